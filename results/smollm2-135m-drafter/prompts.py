# ruff: noqa: E501, SIM905 (tables are read better as they are)
"""Prompts of our own for training a small chat drafter: forms x subjects, drawn with a seed: prompts.py FILE SEED.

Written for this purpose; no public data set was copied. Measure drafters trained on them on other prompts.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

TOPICS = """photosynthesis; the water cycle; black holes; plate tectonics; the French Revolution; inflation; compound interest; the immune
system; vaccines; climate change; solar panels; wind power; electric cars; blockchain; machine learning; neural networks; the
Renaissance; Roman roads; ancient Egypt; the Silk Road; jazz; classical music; impressionism; haiku; Shakespeare's plays; the novel;
public speaking; time management; writing a CV; job interviews; remote work; teamwork; conflict at work; healthy breakfasts; sleep;
stress; meditation; yoga; running; learning to swim; cycling in a city; gardening on a balcony; compost; bees; whales; migrating birds;
wolves; rainforests; coral reefs; deserts; volcanoes; earthquakes; the moon landing; Mars; comets; the speed of light; gravity; magnets;
electric circuits; batteries; steel; glass; paper; printing; the internet; passwords; phishing; open-source software; databases; recursion;
sorting algorithms; version control; unit tests; operating systems; cloud computing; privacy; social media; advertising; branding; small
businesses; taxes; budgets; saving money; renting a flat; insurance; travel in Japan; hiking in the Alps; a weekend in Paris; camping;
cooking pasta; baking bread; coffee; tea; chocolate; vegetarian food; allergies; first aid; teeth; eyesight; parenting; reading to children;
learning a language; grammar; metaphors; logic; probability; fractions; prime numbers; triangles; statistics; the scientific method;
democracy; elections; human rights; the law; trade; poverty; migration; cities; public transport; architecture; bridges; museums; theatre;
film; photography; painting; football; chess; board games; video games; robots; drones; satellites; weather forecasts; oceans; rivers;
farming; forests; dogs; cats; horses; friendship; grief; kindness; happiness; leadership; creativity; ethics; philosophy; religion; myths;
dinosaurs; evolution; DNA; cells; bacteria; viruses; antibiotics; cancer; the heart; the brain; memory; dreams""".replace(
    "\n", " "
).split("; ")

ABOUT = """Explain {} in simple words.; What are the main causes and effects of {}?; Write a short paragraph about {}.; Give me five facts about {}.;
List the advantages and disadvantages of {}.; Write a poem about {}.; Write a short story in which {} plays a role.; What should a beginner know about
{}?; Summarise what is known about {} in three sentences.; Write an introduction to an essay about {}.; Give three tips about {}.; Describe {} to a
ten-year-old.; Compare {} with {}.; How has {} changed over the last hundred years?; Write a dialogue between a teacher and a student about {}.;
Draft a blog post outline about {}.; What are common misunderstandings about {}?; Write an email to a friend who asked about {}.; Suggest a title
for an article about {}.; Name some famous examples of {}.; Why is {} important?; Create a quiz with four questions about {}.; What would you ask
an expert on {}?; Write a product description for a book about {}.; Can you help me understand how {} works?; Explain the connection between {} and
{}.; Write a persuasive speech about {}.; I have to give a talk about {}. How should I structure it?; Make a plan for learning about {} in a
week.; What is the history of {}?""".replace("\n", " ").split("; ")

TEXTS = """The meeting was moved to Thursday because the heating in the main office failed on Monday morning.; She have went to the market yesterday
and buyed three apple.; Our new bottle keeps drinks cold for a day, weighs little and fits into every bag.; The old lighthouse had been dark for forty
years when Mara found the key.; I am writing to complain about the noise from the building site next to our school.; Rain fell all night, and by
morning the river had reached the lowest step of the bridge.; Thank you for your order; it will leave our warehouse tomorrow and arrive within
four days.; He walked slow down the street, thinking that nobody understand him.; The study followed two hundred nurses for six years and found that
night shifts doubled the risk of back pain.; The committee decided that the park should stay open until ten in summer.""".replace(
    "\n", " "
).split(".; ")

EDITS = """Rewrite this text in a more formal tone:; Correct the grammar of this text:; Summarise this text in one sentence:; Make this text shorter:;
Turn this into a headline:; Translate this text into French:; Is the tone of this text positive, negative or neutral?; Continue this text:; List the
nouns in this text:; Rewrite this text from another person's point of view:; Write a reply to this text:; Rate this text for clarity and say
why:""".replace("\n", " ").split("; ")

TASKS = """sum_of_squares|numbers|return the sum of the squares of a list of numbers|[1, 2, 3]|14
count_vowels|text|count the vowels in a string|'banana'|3
is_palindrome|text|check whether a string reads the same backwards|'level'|True
second_largest|numbers|return the second largest number of a list|[4, 9, 7]|7
remove_duplicates|items|remove duplicates from a list and keep the order|[1, 2, 1]|[1, 2]
word_counts|text|count how often each word occurs in a text|'a b a'|{'a': 2, 'b': 1}
flatten|nested|flatten a list of lists|[[1], [2, 3]]|[1, 2, 3]
is_prime|n|check whether a number is prime|7|True
prime_factors|n|return the prime factors of a number|12|[2, 2, 3]
fibonacci|n|return the first n Fibonacci numbers|5|[0, 1, 1, 2, 3]
factorial|n|compute the factorial of a number|5|120
gcd|a, b|compute the greatest common divisor of two numbers|12, 18|6
to_binary|n|convert a number into a binary string|5|'101'
reverse_words|text|reverse the order of the words in a sentence|'one two'|'two one'
is_anagram|a, b|check whether two strings are anagrams of each other|'tea', 'eat'|True
rotate_left|items, k|rotate a list to the left by k places|[1, 2, 3], 1|[2, 3, 1]
merge_sorted|a, b|merge two sorted lists into one sorted list|[1, 4], [2]|[1, 2, 4]
binary_search|items, wanted|find the index of an item in a sorted list by binary search, or -1|[1, 3, 5], 3|1
bubble_sort|items|sort a list with bubble sort|[3, 1, 2]|[1, 2, 3]
quick_sort|items|sort a list with quicksort|[3, 1, 2]|[1, 2, 3]
transpose|matrix|transpose a matrix|[[1, 2], [3, 4]]|[[1, 3], [2, 4]]
multiply_matrices|a, b|multiply two matrices|[[1]], [[2]]|[[2]]
longest_word|text|return the longest word of a sentence|'a bird sings'|'sings'
caesar|text, shift|encrypt a text with a Caesar cipher|'abc', 1|'bcd'
is_leap_year|year|check whether a year is a leap year|2024|True
days_between|a, b|count the days between two ISO dates|'2024-01-01', '2024-01-31'|30
celsius_to_fahrenheit|c|convert degrees Celsius into Fahrenheit|100|212.0
area_of_circle|radius|compute the area of a circle|1|3.14159
median|numbers|compute the median of a list|[3, 1, 2]|2
moving_average|numbers, k|return the moving average over k numbers|[1, 2, 3], 2|[1.5, 2.5]
common_items|a, b|return the items that two lists share|[1, 2], [2, 3]|[2]
group_by_length|words|group words by their length|['a', 'bc']|{1: ['a'], 2: ['bc']}
digit_sum|n|sum the digits of a number|123|6
reverse_number|n|reverse the digits of a number|123|321
is_armstrong|n|check whether a number is an Armstrong number|153|True
collatz_steps|n|count the steps of the Collatz sequence until it reaches 1|6|8
balanced|text|check whether the brackets of a string are balanced|'(())'|True
compress|text|compress a string by run lengths|'aab'|'a2b1'
pairs_with_sum|numbers, total|find all pairs of numbers with a given sum|[1, 2, 3], 4|[(1, 3)]
max_subarray|numbers|return the largest sum of neighbouring numbers|[1, -2, 3]|3
parse_csv_line|line|split a line of CSV into its fields|'a,b'|['a', 'b']
count_lines|path|count the lines of a file|'notes.txt'|42
title_case|text|capitalise every word of a sentence|'the end'|'The End'
remove_punctuation|text|remove the punctuation from a text|'Hi!'|'Hi'
valid_email|text|check with a regular expression whether a text looks like an email address|'a@b.org'|True
dict_from_lists|keys, values|make a dictionary from two lists|['a'], [1]|{'a': 1}
invert_dict|d|swap the keys and values of a dictionary|{'a': 1}|{1: 'a'}
sort_by_value|d|sort a dictionary by its values|{'a': 2, 'b': 1}|{'b': 1, 'a': 2}
chunk|items, n|split a list into parts of n items|[1, 2, 3], 2|[[1, 2], [3]]
permutations|items|return all orders of a list|[1, 2]|[[1, 2], [2, 1]]
power_set|items|return all subsets of a list|[1]|[[], [1]]
hanoi|n|count the moves of the Towers of Hanoi|3|7
roman_to_int|text|convert a Roman numeral into a number|'XIV'|14
int_to_roman|n|convert a number into a Roman numeral|14|'XIV'
hamming|a, b|count the places at which two strings differ|'abc', 'abd'|1
edit_distance|a, b|compute the edit distance of two strings|'cat', 'cut'|1
shortest_path|graph, start, end|find a shortest path in a graph by breadth-first search|{'a': ['b']}, 'a', 'b'|['a', 'b']
depth|tree|return the depth of a nested list|[1, [2]]|2
multiples|n, limit|list the multiples of n below a limit|3, 10|[3, 6, 9]
perfect_squares|limit|list the perfect squares up to a limit|10|[1, 4, 9]
even_numbers|numbers|keep the even numbers of a list|[1, 2]|[2]
dot_product|a, b|compute the dot product of two vectors|[1, 2], [3, 4]|11
standard_deviation|numbers|compute the standard deviation of a list|[1, 3]|1.0
clamp|x, low, high|keep a number within two bounds|5, 0, 3|3
simple_interest|p, rate, years|compute simple interest|100, 0.05, 2|10.0
bmi|kg, m|compute the body mass index|70, 1.75|22.86
tuple_min|rows|find the tuple with the smallest second item|[(1, 3), (2, 1)]|(2, 1)
last_digit|n|return the last digit of a number|123|3
swap_case|text|swap upper and lower case|'aB'|'Ab'
nth_largest|numbers, n|return the n largest numbers of a list|[1, 5, 3], 2|[5, 3]
is_sorted|items|check whether a list is sorted|[1, 2]|True
insert_everywhere|items, x|insert an item in front of every item of a list|[1, 2], 0|[0, 1, 0, 2]
triangle_kind|a, b, c|say whether a triangle is equilateral, isosceles or scalene|2, 2, 2|'equilateral'
hex_to_int|text|convert a hexadecimal string into a number|'ff'|255
unique_chars|text|check whether all characters of a string differ|'abc'|True
sum_nested|items|sum all numbers in nested lists|[1, [2]]|3
lcm|a, b|compute the least common multiple of two numbers|4, 6|12
fizzbuzz|n|print the numbers from 1 to n with Fizz and Buzz|3|['1', '2', 'Fizz']
running_total|numbers|return the running total of a list|[1, 2]|[1, 3]
column|matrix, k|return one column of a matrix|[[1, 2]], 1|[2]""".split("\n")

SOLVE = "Write a solution to this problem and make sure that it passes the tests:\n```python\n{}\n```"
CODE = [
    "Write a function to {what}.",
    "Write a Python function to {what}.",
    "Write a function `{name}({args})` to {what}. Add an example.",
    "Write a Python script to {what}, and explain how it works.",
    "How can I {what} in Python?",
    "Write unit tests for a Python function `{name}({args})` that should {what}.",
    "Write a JavaScript function to {what}.",
    "Write a function to {what}.\nYour code should pass this test:\nassert {name}({given}) == {result}",
]
STUBS = [
    'def {name}({args}):\n    """{What}.\n\n    >>> {name}({given})\n    {result}\n    """',
    'def {name}({args}):\n    """\n    {What}.\n    Example:\n    {name}({given}) == {result}\n    """',
    "from typing import *\n\n\ndef {name}({args}):\n    '''{What}.\n    {name}({given}) -> {result}\n    '''",
]


def chat(rng: random.Random) -> str:
    """A question about one or two subjects, or a text to work on."""
    if rng.random() < 0.12:
        return f"{rng.choice(EDITS)}\n\n{rng.choice(TEXTS).rstrip('.')}. {rng.choice(TEXTS).rstrip('.')}."
    form = rng.choice(ABOUT)
    return form.format(*rng.sample(TOPICS, form.count("{}")))


def code(rng: random.Random, tasks: Sequence[str] = TASKS) -> str:
    """A programming task: in words, or as a signature with its docstring."""
    name, args, what, given, result = rng.choice(tasks).split("|")
    facts = {"name": name, "args": args, "what": what, "What": what.capitalize(), "given": given, "result": result}
    if rng.random() < 0.45:
        return SOLVE.format(rng.choice(STUBS).format(**facts))
    return rng.choice(CODE).format(**facts)


def prompts(seed: int) -> Iterator[dict[str, object]]:
    """Without end, none twice: half chat, half code while there is new code."""
    rng, seen = random.Random(seed), set()
    while True:
        kind = rng.choice([chat, code])
        text = kind(rng)
        if text not in seen:
            seen.add(text)
            yield {"id": f"forms/{len(seen)}", "dataset": f"forms_{kind.__name__}", "turns": [text]}


if __name__ == "__main__":
    drawn = islice(prompts(int(sys.argv[2])), 3200)
    Path(sys.argv[1]).write_text("".join(json.dumps(prompt) + "\n" for prompt in drawn))
