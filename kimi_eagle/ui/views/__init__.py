"""The views, a module each: what is asked → a `View`. None of them knows HTTP."""
