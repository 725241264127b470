"""The page for people: read-only views of a registry, over loopback (`server`) or in one file
(`report`).

A view (`views/`) reads the registry into a `View`: a JSON document, and a template that shows it.
Curves and lineages are drawn here as SVG (`chart`, `graph`), so that every page is whole without
scripts.
"""
