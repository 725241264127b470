"""Seeded generator of short English dialogues, the chat data of the demo.

Every assistant turn is a deterministic function of the question before it, written in full
boilerplate sentences: a verifier of a few million parameters can learn it, and its greedy text is
predictable enough for a one-layer draft to be accepted often.

    python -m kimi_eagle.demo.dialogues --seed 1 --count 5

prints one dialogue a line: ``{"id": "demo-1-0", "messages": [{"role": "user", ...}, ...]}``. The
assistant turns of about three dialogues in four carry ``reasoning_content``.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

REASONING_SHARE = 0.75
SYSTEM_SHARE = 0.08
TWO_TURN_SHARE = 0.2
THANKS_SHARE = 0.25

SYSTEM_PROMPTS = (
    "You are a careful assistant.",
    "You are a helpful teacher. Answer in full sentences.",
    "Answer the question and explain how you can check it.",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
# No two words share their first letter, so sorting needs the first letters only.
WORDS = (
    "apple", "bread", "candle", "door", "engine", "flower", "garden", "house", "island", "jacket",
    "kitchen", "lemon", "market", "needle", "orange", "paper", "queen", "river", "stone", "table",
)  # fmt: skip
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "China": "Beijing", "Egypt": "Cairo", "Greece": "Athens", "Norway": "Oslo", "Poland": "Warsaw",
    "Austria": "Vienna", "Portugal": "Lisbon", "Peru": "Lima", "Cuba": "Havana", "Kenya": "Nairobi",
    "Ireland": "Dublin",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "light": "dark", "old": "new",
    "hard": "soft", "early": "late", "full": "empty", "wet": "dry", "rich": "poor",
    "strong": "weak", "loud": "quiet", "open": "closed", "clean": "dirty", "happy": "sad",
}  # fmt: skip

THANKS = ("Thank you, that helps.", "Thanks a lot!", "Great, thank you.")

Message = dict[str, str]


class Exchange(NamedTuple):
    """One question with the reasoning and the answer it determines."""

    question: str
    reasoning: str
    answer: str


def _listing(items: list[str]) -> str:
    """``["a", "b", "c"]`` as ``"a, b and c"``."""
    return ", ".join(items[:-1]) + " and " + items[-1]


def _addition(rng: random.Random) -> Exchange:
    a, b = rng.randint(1, 30), rng.randint(1, 30)
    question = rng.choice(
        (
            f"What is {a} plus {b}?",
            f"Please add {a} and {b}.",
            f"Can you tell me the sum of {a} and {b}?",
        )
    )
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    reasoning = (
        f"Add {a} and {b}. The tens are {a // 10 * 10} and {b // 10 * 10}, which makes {tens}. "
        f"The ones are {a % 10} and {b % 10}, which makes {ones}. "
        f"Together {tens} plus {ones} is {a + b}."
    )
    return Exchange(
        question,
        reasoning,
        f"The sum of {a} and {b} is {a + b}. "
        f"You can check this by taking {b} away from {a + b}, which leaves {a}.",
    )


def _subtraction(rng: random.Random) -> Exchange:
    b, rest = rng.randint(1, 20), rng.randint(1, 30)
    a = b + rest
    question = rng.choice(
        (
            f"What is {a} minus {b}?",
            f"Please subtract {b} from {a}.",
            f"How much is left if I take {b} from {a}?",
        )
    )
    middle = a - b // 10 * 10
    reasoning = (
        f"Take {b} from {a}. First the tens: {a} minus {b // 10 * 10} is {middle}. "
        f"Then the ones: {middle} minus {b % 10} is {rest}."
    )
    return Exchange(
        question,
        reasoning,
        f"If you take {b} from {a}, the result is {rest}. "
        f"You can check this by adding {b} to {rest}, which makes {a}.",
    )


def _larger(rng: random.Random) -> Exchange:
    first_ten, second_ten = rng.sample(range(1, 10), 2)
    a, b = first_ten * 10 + rng.randint(0, 9), second_ten * 10 + rng.randint(0, 9)
    high, low = max(a, b), min(a, b)
    question = rng.choice(
        (
            f"Which number is larger, {a} or {b}?",
            f"Compare {a} and {b}.",
            f"Is {a} or {b} the larger number?",
        )
    )
    reasoning = (
        f"Compare {a} and {b}. The tens digits are {a // 10} and {b // 10}. "
        f"Since {high // 10} is more than {low // 10}, {high} is larger than {low}."
    )
    return Exchange(
        question,
        reasoning,
        f"The larger number is {high}. "
        f"It has {high // 10} tens, while {low} has only {low // 10} tens.",
    )


def _counting(rng: random.Random) -> Exchange:
    start = rng.randint(1, 60)
    stop = start + rng.randint(4, 8)
    question = rng.choice(
        (f"Count from {start} to {stop}.", f"Which numbers go from {start} to {stop}?")
    )
    numbers = [str(n) for n in range(start, stop + 1)]
    reasoning = f"I start at {start} and add one each time until I reach {stop}."
    return Exchange(
        question,
        reasoning,
        f"Counting from {start} to {stop} gives {_listing(numbers)}. The count ends at {stop}.",
    )


def _parity(rng: random.Random) -> Exchange:
    number = rng.randint(10, 99)
    digit = number % 10
    kind, remainder = ("odd", "1") if digit % 2 else ("even", "0")
    question = rng.choice(
        (
            f"Is {number} even or odd?",
            f"Tell me whether {number} is even or odd.",
            f"Is the number {number} odd?",
        )
    )
    reasoning = (
        f"The last digit of {number} is {digit}. "
        f"The digit {digit} is {kind}, so {number} is {kind}."
    )
    return Exchange(
        question,
        reasoning,
        f"The number {number} is {kind}, because its last digit is {digit}. "
        f"If you divide it by 2, the remainder is {remainder}.",
    )


def _steps(names: tuple[str, ...], start: int, count: int) -> list[str]:
    """The ``count`` names that follow ``names[start]``, going round at the end."""
    return [names[(start + step) % len(names)] for step in range(1, count + 1)]


def _weekday(rng: random.Random) -> Exchange:
    start, count = rng.randrange(7), rng.randint(2, 6)
    day, passed = DAYS[start], _steps(DAYS, start, count)
    question = rng.choice(
        (
            f"Which day comes {count} days after {day}?",
            f"Today is {day}. What day is it in {count} days?",
            f"If it is {day} now, which day will it be {count} days later?",
        )
    )
    reasoning = f"I start at {day} and go {count} days forward: {', '.join(passed)}."
    return Exchange(
        question,
        reasoning,
        f"The day that comes {count} days after {day} is {passed[-1]}. "
        f"The days on the way are {_listing(passed)}.",
    )


def _month(rng: random.Random) -> Exchange:
    start, count = rng.randrange(12), rng.randint(2, 5)
    month, passed = MONTHS[start], _steps(MONTHS, start, count)
    question = rng.choice(
        (
            f"Which month comes {count} months after {month}?",
            f"It is {month}. Which month is it in {count} months?",
        )
    )
    reasoning = f"I start at {month} and go {count} months forward: {', '.join(passed)}."
    return Exchange(
        question,
        reasoning,
        f"The month that comes {count} months after {month} is {passed[-1]}. "
        f"The months on the way are {_listing(passed)}.",
    )


def _weeks(rng: random.Random) -> Exchange:
    weeks = rng.randint(2, 12)
    unit, size, parts = rng.choice(
        (("weeks", 7, "days"), ("years", 12, "months"), ("minutes", 60, "seconds"))
    )
    question = rng.choice(
        (f"How many {parts} are in {weeks} {unit}?", f"Please turn {weeks} {unit} into {parts}.")
    )
    reasoning = (
        f"I know the number of {parts} in one of the {unit}. "
        f"It is {size}, and {weeks} times {size} is {weeks * size}."
    )
    return Exchange(
        question,
        reasoning,
        f"There are {weeks * size} {parts} in {weeks} {unit}, "
        f"because {weeks} times {size} is {weeks * size}.",
    )


def _sorting(rng: random.Random) -> Exchange:
    words = rng.sample(WORDS, rng.randint(3, 4))
    listed, ordered = ", ".join(words), sorted(words)
    question = rng.choice(
        (
            f"Sort these words: {listed}.",
            f"Put these words in order: {listed}.",
            f"Please sort the words {listed}.",
        )
    )
    letters = ", ".join(word[0] for word in words)
    ranked = ", ".join(word[0] for word in ordered)
    reasoning = f"The first letters are {letters}. In the alphabet the order is {ranked}."
    return Exchange(
        question,
        reasoning,
        f"In alphabetical order the words are {_listing(ordered)}. The first word is {ordered[0]} "
        f"and the last word is {ordered[-1]}.",
    )


def _reversal(rng: random.Random) -> Exchange:
    words = rng.sample(WORDS, rng.randint(3, 5))
    listed, backward = ", ".join(words), words[::-1]
    question = rng.choice(
        (
            f"Reverse this list: {listed}.",
            f"Write this list backward: {listed}.",
            f"Please reverse the list {listed}.",
        )
    )
    reasoning = (
        "I read the list from the end to the start. "
        f"The last word is {words[-1]}, so I begin with {words[-1]}."
    )
    return Exchange(
        question,
        reasoning,
        f"The reversed list is {_listing(backward)}. "
        f"It begins with {backward[0]} and it ends with {backward[-1]}.",
    )


def _word_count(rng: random.Random) -> Exchange:
    words = rng.sample(WORDS, rng.randint(3, 6))
    listed = ", ".join(words)
    question = rng.choice(
        (f"How many words are in this list: {listed}?", f"Count the words in this list: {listed}.")
    )
    counted = ", ".join(f"{word} {place}" for place, word in enumerate(words, 1))
    reasoning = f"I count the words one by one: {counted}."
    return Exchange(
        question,
        reasoning,
        f"There are {len(words)} words in the list. "
        f"The first word is {words[0]} and the last word is {words[-1]}.",
    )


def _spelling(rng: random.Random) -> Exchange:
    word = rng.choice(WORDS)
    question = rng.choice(
        (
            f"How many letters are in the word {word}?",
            f"How do you spell {word}?",
            f"Please count the letters of {word}.",
            f"Spell the word {word} for me.",
        )
    )
    reasoning = (
        f"I spell the word {word} letter by letter and count the letters. There are {len(word)}."
    )
    return Exchange(
        question,
        reasoning,
        f"The word {word} is spelled {', '.join(word)}. "
        f"It has {len(word)} letters and the first letter is {word[0]}.",
    )


def _capital(rng: random.Random) -> Exchange:
    country = rng.choice(tuple(CAPITALS))
    city = CAPITALS[country]
    question = rng.choice(
        (
            f"What is the capital of {country}?",
            f"Which city is the capital of {country}?",
            f"Please name the capital of {country}.",
            f"Do you know the capital city of {country}?",
        )
    )
    reasoning = f"The question is about the country {country}. Its capital is the city {city}."
    return Exchange(
        question,
        reasoning,
        f"The capital of {country} is {city}. "
        f"If you travel to {country}, you can visit the city {city}.",
    )


def _opposite(rng: random.Random) -> Exchange:
    pair = rng.choice(tuple(OPPOSITES.items()))
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    question = rng.choice(
        (
            f"What is the opposite of {word}?",
            f"Which word means the opposite of {word}?",
            f"Please tell me the opposite of {word}.",
        )
    )
    reasoning = f"The word is {word}. Something that is not {word} at all is {other}."
    return Exchange(
        question,
        reasoning,
        f"The opposite of {word} is {other}. If something is {word}, then it is not {other}.",
    )


KINDS: tuple[Callable[[random.Random], Exchange], ...] = (
    _addition,
    _subtraction,
    _larger,
    _counting,
    _parity,
    _weekday,
    _month,
    _weeks,
    _sorting,
    _reversal,
    _word_count,
    _spelling,
    _capital,
    _opposite,
)


def _thanks(rng: random.Random) -> Exchange:
    """A closing turn; it only makes sense after an answer."""
    return Exchange(
        rng.choice(THANKS),
        "The user says thank you, so I answer in a friendly way.",
        "You are welcome. Please ask me again if you have another question.",
    )


def _dialogue(rng: random.Random) -> list[Message]:
    """The messages of one dialogue: maybe a system message, then one or two exchanges."""
    exchanges = [rng.choice(KINDS)(rng)]
    if rng.random() < TWO_TURN_SHARE:
        exchanges.append((_thanks if rng.random() < THANKS_SHARE else rng.choice(KINDS))(rng))
    with_reasoning = rng.random() < REASONING_SHARE
    messages: list[Message] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        answer = {"role": "assistant", "content": exchange.answer}
        if with_reasoning:
            answer["reasoning_content"] = exchange.reasoning
        messages.append(answer)
    return messages


def stream(seed: int) -> Iterator[dict[str, Any]]:
    """Endless dialogues of one seed; the first ``n`` are ``generate(seed, n)``."""
    rng = random.Random(seed)  # noqa: S311
    index = 0
    while True:
        yield {"id": f"demo-{seed}-{index}", "messages": _dialogue(rng)}
        index += 1


def generate(seed: int, count: int) -> list[dict[str, Any]]:
    """The first ``count`` dialogues of a seed, each ``{"id": str, "messages": [...]}``."""
    dialogues = stream(seed)
    return [next(dialogues) for _ in range(count)]


def main() -> None:
    """Print dialogues as JSON lines."""
    parser = argparse.ArgumentParser(
        description="Print generated demo dialogues, one JSON object a line."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args()
    for dialogue in generate(arguments.seed, arguments.count):
        print(json.dumps(dialogue, ensure_ascii=False))


if __name__ == "__main__":
    main()
