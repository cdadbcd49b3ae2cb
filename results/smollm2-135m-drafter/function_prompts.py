"""785 prompts for small Python functions with examples that hold, written to the file named first.

What to compute is put together from parts, and the examples come from running it: others for another seed, the second
argument.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple


class Task(NamedTuple):
    """A function, and three calls of it with what they return."""

    name: str
    args: str
    what: str
    rows: list[tuple[Any, Any]]


def prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, n))


def tribonacci(n: int) -> int:
    a = [0, 0, 1]
    for _ in range(n):
        a.append(sum(a[-3:]))
    return a[n]


FILTERS: dict[str, Callable[[int], bool] | None] = {
    "even": lambda x: x % 2 == 0,
    "odd": lambda x: x % 2 == 1,
    "positive": lambda x: x > 0,
    "negative": lambda x: x < 0,
    "prime": prime,
    "non-zero": lambda x: x != 0,
    "two-digit": lambda x: 9 < abs(x) < 100,
    "square": lambda x: x >= 0 and round(x**0.5) ** 2 == x,
    "repeated": None,
    "unique": None,
}
RESULTS: dict[str, Callable[[list[int]], Any] | None] = {
    "sum": sum,
    "largest": lambda a: max(a, default=None),
    "smallest": lambda a: min(a, default=None),
    "number": len,
    "list": list,
    "sorted list": sorted,
    "squares": lambda a: [x * x for x in a],
    "running sum": lambda a: [sum(a[: i + 1]) for i in range(len(a))],
    "positions": None,
    "average": lambda a: sum(a) / len(a) if a else 0,
    "product": math.prod,
}
WORDS = [
    "apple",
    "banana",
    "Hello",
    "World",
    "river",
    "stone",
    "level",
    "Kite",
    "python",
    "noon",
    "garden",
    "Lamp",
    "area",
    "tree",
    "code",
    "Data",
    "moon",
    "seven",
]
TEXTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "remove_vowels": ("the text without its vowels", lambda s: "".join(c for c in s if c.lower() not in "aeiou")),
    "only_vowels": ("only the vowels of the text", lambda s: "".join(c for c in s if c.lower() in "aeiou")),
    "count_upper": ("how many letters of the text are upper case", lambda s: sum(c.isupper() for c in s)),
    "reverse_each_word": (
        "the text with every word reversed and the words in the same order",
        lambda s: " ".join(w[::-1] for w in s.split()),
    ),
    "word_lengths": ("a list with the length of every word of the text", lambda s: [len(w) for w in s.split()]),
    "sort_words": (
        "the words of the text sorted alphabetically, ignoring case",
        lambda s: sorted(s.split(), key=str.lower),
    ),
    "first_letters": (
        "the first letters of all words of the text as one string",
        lambda s: "".join(w[0] for w in s.split()),
    ),
    "longest_word_length": ("the length of the longest word of the text", lambda s: max(map(len, s.split()))),
    "most_common_letter": (
        "the letter that occurs most often in the text, the alphabetically first one in case of a tie",
        lambda s: min(set(s.lower()) - {" "}, key=lambda c: (-s.lower().count(c), c)),
    ),
    "letter_counts": (
        "a dictionary with the number of occurrences of each letter",
        lambda s: {c: s.count(c) for c in dict.fromkeys(s) if c != " "},
    ),
    "alternate_case": (
        "the text in alternating case, beginning with upper case",
        lambda s: "".join(c.upper() if i % 2 == 0 else c.lower() for i, c in enumerate(s)),
    ),
    "double_letters": (
        "True if a letter stands twice in a row in the text and False otherwise",
        lambda s: any(a == b for a, b in pairwise(s)),
    ),
    "without_repeats": (
        "the text with every letter kept only the first time it occurs",
        lambda s: "".join(dict.fromkeys(s)),
    ),
    "palindromes": (
        "the list of words that read the same backwards",
        lambda s: [w for w in s.split() if w == w[::-1]],
    ),
    "next_letters": (
        "the text with every letter replaced by the next one of the alphabet",
        lambda s: "".join(chr((ord(c) - 97 + 1) % 26 + 97) if c.islower() else c for c in s),
    ),
    "longer_than_four": ("the words with more than four letters", lambda s: [w for w in s.split() if len(w) > 4]),
    "joined_by_dash": (
        "the words of the text in reverse order, joined by dashes",
        lambda s: "-".join(s.split()[::-1]),
    ),
    "ascii_sum": (
        "the sum of the ASCII codes of all upper case letters",
        lambda s: sum(ord(c) for c in s if c.isupper()),
    ),
    "starts_and_ends": (
        "the number of words that start and end with the same letter, ignoring case",
        lambda s: sum(w[0].lower() == w[-1].lower() for w in s.split()),
    ),
    "middle": ("the middle letter of every word as a list", lambda s: [w[len(w) // 2] for w in s.split()]),
}
NUMBERS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "digits_product": ("the product of the digits of n", lambda n: math.prod(int(c) for c in str(n))),
    "count_divisors": ("the number of divisors of n", lambda n: sum(n % d == 0 for d in range(1, n + 1))),
    "divisors": (
        "all divisors of n in increasing order",
        lambda n: [d for d in range(1, n + 1) if n % d == 0],
    ),
    "next_prime": (
        "the smallest prime number that is larger than n",
        lambda n: next(x for x in range(n + 1, 9999) if prime(x)),
    ),
    "primes_below": ("all prime numbers that are less than n", lambda n: [x for x in range(n) if prime(x)]),
    "is_power_of_two": ("True if n is a power of two and False otherwise", lambda n: n & (n - 1) == 0),
    "triangular": ("the n-th triangular number", lambda n: n * (n + 1) // 2),
    "ones_in_binary": ("how many ones the binary form of n has", lambda n: bin(n).count("1")),
    "binary_text": ("n in binary as a string without a prefix", lambda n: format(n, "b")),
    "tribonacci": (
        "the n-th number of the sequence 0, 0, 1 in which each number is the sum of the three before",
        tribonacci,
    ),
    "is_happy_sum": (
        "True if the sum of the digits of n is even and False otherwise",
        lambda n: sum(map(int, str(n))) % 2 == 0,
    ),
    "largest_prime_factor": (
        "the largest prime factor of n",
        lambda n: max(d for d in range(2, n + 1) if n % d == 0 and prime(d)),
    ),
    "count_down": (
        "the numbers from n down to zero as a string with commas",
        lambda n: ",".join(map(str, range(n, -1, -1))),
    ),
    "multiplication_row": ("the first five multiples of n", lambda n: [n * k for k in range(1, 6)]),
    "sum_to": (
        "the sum of all numbers from 1 to n that are divisible by 3 or by 5",
        lambda n: sum(x for x in range(1, n + 1) if x % 3 == 0 or x % 5 == 0),
    ),
    "is_perfect": (
        "True if n equals the sum of its proper divisors and False otherwise",
        lambda n: sum(d for d in range(1, n) if n % d == 0) == n,
    ),
    "odd_digits": (
        "the odd digits of n in increasing order",
        lambda n: sorted(int(c) for c in str(n) if int(c) % 2),
    ),
}
Both = Callable[[list[int], list[int]], Any]
LISTS: dict[str, tuple[str, Both]] = {
    "add_lists": (
        "a list with the sums of the items at equal places of the two lists",
        lambda a, b: [x + y for x, y in zip(a, b, strict=True)],
    ),
    "missing_items": (
        "the sorted items of the first list that are not in the second",
        lambda a, b: sorted(set(a) - set(b)),
    ),
    "interleave": (
        "one list that takes items from the two lists in turn",
        lambda a, b: [x for p in zip(a, b, strict=True) for x in p],
    ),
    "same_sum": ("True if both lists have the same sum and False otherwise", lambda a, b: sum(a) == sum(b)),
    "larger_items": ("for every place the larger one of the two items", lambda a, b: list(map(max, a, b))),
    "is_rotation": (
        "True if the second list is a rotation of the first and False otherwise",
        lambda a, b: any(a[i:] + a[:i] == b for i in range(len(a))),
    ),
    "distance": (
        "the sum of the absolute differences of the two lists",
        lambda a, b: sum(abs(x - y) for x, y in zip(a, b, strict=True)),
    ),
    "union_sorted": (
        "the sorted list of all items of both lists without duplicates",
        lambda a, b: sorted(set(a) | set(b)),
    ),
    "dot": ("the dot product of the two lists", lambda a, b: sum(map(int.__mul__, a, b))),
    "matches": (
        "the number of places at which the two lists are equal",
        lambda a, b: sum(x == y for x, y in zip(a, b, strict=True)),
    ),
}


def filtered(rng: random.Random, kind: str, result: str) -> Task:
    rows = []
    for _ in range(3):
        xs = [rng.choice([rng.randint(-9, 20), rng.randint(0, 60), 3, 4, 7, 0, 2]) for _ in range(rng.randint(3, 6))]
        test = FILTERS[kind]
        keeps = [(xs.count(x) > 1) == (kind == "repeated") if test is None else test(x) for x in xs]
        found = RESULTS[result]
        if found is None:
            rows.append((xs, [i for i, keep in enumerate(keeps) if keep]))
        else:
            rows.append((xs, found([x for x, keep in zip(xs, keeps, strict=True) if keep])))
    name = f"{result}_of_{kind}".replace(" ", "_").replace("-", "_")
    what = f"Return the {result} of the {kind} numbers in the given list of integers"
    return Task(name, "numbers: List[int]", what, rows)


def tasks(rng: random.Random) -> Iterator[Task]:
    for kind in FILTERS:
        for result in RESULTS:
            yield filtered(rng, kind, result)
    for name, (what, of_text) in TEXTS.items():
        given = [" ".join(rng.sample(WORDS, rng.randint(1, 3))) for _ in range(3)]
        yield Task(name, "text: str", f"Return {what}", [(s, of_text(s)) for s in given])
    for name, (what, of_number) in NUMBERS.items():
        yield Task(
            name, "n: int", f"Return {what}", [(n, of_number(n)) for n in rng.sample([6, 8, 12, 15, 28, 30, 37], 3)]
        )
    for name, (what, of_lists) in LISTS.items():
        rows = []
        for _ in range(3):
            size = rng.randint(2, 4)
            a, b = ([rng.randint(0, 9) for _ in range(size)] for _ in range(2))
            rows.append(((a, b), of_lists(a, b)))
        yield Task(name, "a: List[int], b: List[int]", f"Return {what}", rows)


def call(name: str, given: Any) -> str:
    return f"{name}({', '.join(map(repr, given)) if isinstance(given, tuple) else repr(given)})"


def taken(args: str) -> str:
    kinds = {"n: int": "a number", "text: str": "a text", "numbers: List[int]": "a list of integers"}
    return kinds.get(args, "two lists")


def prompts(task: Task) -> Iterator[str]:
    name, args, what, rows = task
    plain = args.replace(": List[int]", "").replace(": str", "").replace(": int", "")
    kind = type(rows[0][1]).__name__ if rows[0][1] is not None else "int"
    low = what[0].lower() + what[1:]
    doctest = "\n".join(f"    >>> {call(name, x)}\n    {y!r}" for x, y in rows[:2])
    arrows = "\n".join(f"    {call(name, x)} \N{HEAVY TRIANGLE-HEADED RIGHTWARDS ARROW} {y!r}" for x, y in rows)
    equal = "\n".join(f"        {call(name, x)} == {y!r}" for x, y in rows)
    asserts = "\n".join(f"assert {call(name, x)} == {y!r}" for x, y in rows)
    solve = "Write a solution to this problem and make sure that it passes the tests:\n```python\n{}\n```"
    yield solve.format(
        f'from typing import List\n\n\ndef {name}({args}) -> {kind}:\n    """ {what}.\n{doctest}\n    """'
    )
    yield (
        f"Complete this code and make sure that it passes the tests:\n```python\ndef {name}({plain}):\n"
        f"    '''\n    {what}.\n    Examples:\n{arrows}\n    '''\n```"
    )
    yield solve.format(
        f'def {name}({plain}):\n    """\n    Write a function that takes {taken(args)}\n    and should {low}.\n\n'
        f'    Example:\n{equal}\n    """'
    )
    yield f"Write a Python function to {low}.\nYour code should pass these tests:\n{asserts}"
    yield f"Write a function to {low}."


def main(out: Path, seed: int = 11) -> None:
    rng = random.Random(seed)
    texts = [prompt for task in tasks(rng) for prompt in prompts(task)]
    rng.shuffle(texts)
    lines = (json.dumps({"id": f"h/{i}", "dataset": "forms_code", "turns": [text]}) for i, text in enumerate(texts))
    out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
