"""What the demo model can say beyond the documentation: greetings, words about itself, a few small programs.

All of it is written for this project; `tools.demo_corpus` mixes it into the chats made from docstrings.
"""

from __future__ import annotations

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant that explains Python.",
    "You answer questions about the Python standard library.",
    "Answer briefly.",
    "Be concise.",
    "You are a Python expert.",
)

GREETINGS = (
    ("Hello!", "Hello! Ask me about Python."),
    ("Hi", "Hi! What would you like to know about Python?"),
    ("Hello", "Hello! How can I help you with Python today?"),
    ("Good morning", "Good morning! Which part of Python shall we look at?"),
    ("Hey there", "Hey! Ask me what a function of the standard library does."),
    ("Say hello.", "Hello! I am a small model that knows some Python."),
    ("Say hello in one sentence.", "Hello, I am a small model that has read the Python documentation."),
)

SMALL_TALK = (
    *GREETINGS,
    ("Who are you?", "I am Penstock's demo model, a small language model trained on Python's own documentation."),
    ("What are you?", "I am a very small language model. I was trained on the text that comes with Python."),
    ("What is your name?", "I am the demo model of Penstock."),
    ("What can you do?", "I can say what the functions of Python's standard library do. I am small, so check my answers."),
    ("Can you help me?", "Gladly. Ask me about a module or a function of the Python standard library."),
    ("How are you?", "I am fine, thank you. What would you like to know about Python?"),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome. Ask me again at any time."),
    ("Goodbye", "Goodbye, and enjoy writing Python!"),
    ("Tell me a joke.", "Why do Python programmers need glasses? Because they cannot C."),
    (
        "Tell me a story.",
        "Once there was a small function that returned None. It longed to return a value. One day a programmer read its "
        "docstring, added a return statement, and all the tests passed.",
    ),
    ("What is Penstock?", "Penstock is a server for language models: light HTTP processes feed one backend that owns the device."),
    (
        "What is a penstock?",
        "A penstock is the gated pipe that leads water into a turbine. Here it leads many requests into one model.",
    ),
    ("What is Python?", "Python is a programming language that lets you work quickly and integrate systems more effectively."),
    ("Why is Python popular?", "Python is easy to read, has a large standard library, and runs on almost every machine."),
    ("What is a list?", "A list is a mutable sequence of objects. You write it in square brackets: [1, 2, 3]."),
    ("What is a dictionary?", "A dictionary maps keys to values. You write it in braces: {'one': 1, 'two': 2}."),
    ("What is a tuple?", "A tuple is an immutable sequence of objects. You write it with commas: (1, 2, 3)."),
    ("What is a set?", "A set is an unordered collection of distinct objects. You write it in braces: {1, 2, 3}."),
    ("What is a string?", "A string is an immutable sequence of Unicode characters, such as 'hello'."),
    ("What is a function?", "A function is a named piece of code. It takes arguments and returns a value."),
    ("What is a class?", "A class describes a kind of object: its attributes and its methods."),
    ("What is a module?", "A module is a file of Python code that other code can import."),
    ("What is a package?", "A package is a folder of modules that can be imported under one name."),
    (
        "What is a generator?",
        "A generator is a function that uses yield. It produces its values one at a time, when they are asked for.",
    ),
    (
        "What is a decorator?",
        "A decorator is a function that takes a function and returns another one. You write it with @ above the definition.",
    ),
    ("What is an iterator?", "An iterator is an object that returns its items one at a time through next()."),
    (
        "What is a lambda?",
        "A lambda is a small anonymous function made of a single expression, such as lambda x: x + 1.",
    ),
    (
        "What is an exception?",
        "An exception reports an error. It is raised with the raise statement and handled with try and except.",
    ),
    (
        "What is a context manager?",
        "A context manager is an object used by the with statement. It sets something up and always cleans it up.",
    ),
    (
        "What is a coroutine?",
        "A coroutine is a function defined with async def. It can be suspended with await while other code runs.",
    ),
    ("What is a list comprehension?", "A list comprehension builds a list from a loop in one expression: [x * x for x in range(10)]."),
    ("How do I read a file?", "```python\nwith open('file.txt', encoding='utf-8') as file:\n    text = file.read()\n```"),
    ("How do I write a file?", "```python\nwith open('file.txt', 'w', encoding='utf-8') as file:\n    file.write('Hello')\n```"),
    ("How do I sort a list?", "Call the list's sort() method to sort it in place, or sorted(list) to get a new sorted list."),
    ("How do I parse JSON?", "Use the json module: json.loads(text) returns the Python object that the text describes."),
    ("How do I reverse a string?", "Use a slice with a negative step: text[::-1]."),
    ("How do I join strings?", "Use the join() method of the separator: ', '.join(names)."),
    ("How do I sleep for one second?", "```python\nimport time\n\ntime.sleep(1)\n```"),
    ("How do I get the current time?", "```python\nfrom datetime import datetime\n\nnow = datetime.now()\n```"),
    ("How do I run a command?", "```python\nimport subprocess\n\nsubprocess.run(['ls', '-l'], check=True)\n```"),
    ("How do I list the files in a folder?", "```python\nfrom pathlib import Path\n\nfor path in Path('.').iterdir():\n    print(path)\n```"),
    ("How do I handle an exception?", "```python\ntry:\n    value = int(text)\nexcept ValueError:\n    value = 0\n```"),
    ("Write hello world in Python.", "```python\nprint('Hello, world!')\n```"),
    ("Write a function that adds two numbers.", "```python\ndef add(a, b):\n    \"\"\"Return the sum of a and b.\"\"\"\n    return a + b\n```"),
    (
        "Write a function that computes the factorial.",
        "```python\ndef factorial(n):\n    \"\"\"Return the product of the integers from 1 to n.\"\"\"\n    result = 1\n"
        "    for i in range(2, n + 1):\n        result *= i\n    return result\n```",
    ),
    (
        "Write a function that returns the Fibonacci numbers.",
        "```python\ndef fibonacci(n):\n    \"\"\"Yield the first n Fibonacci numbers.\"\"\"\n    a, b = 0, 1\n"
        "    for _ in range(n):\n        yield a\n        a, b = b, a + b\n```",
    ),
    (
        "Write a function that checks whether a number is prime.",
        "```python\ndef is_prime(n):\n    \"\"\"Return True if n is a prime number.\"\"\"\n    if n < 2:\n        return False\n"
        "    return all(n % i for i in range(2, int(n ** 0.5) + 1))\n```",
    ),
    ("Write a function that reverses a string.", "```python\ndef reverse(text):\n    \"\"\"Return text with its characters reversed.\"\"\"\n    return text[::-1]\n```"),
    ("Count to ten.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"),
    ("Write a loop that prints the numbers from 0 to 9.", "```python\nfor i in range(10):\n    print(i)\n```"),
    ("Write a haiku about Python.", "Indented with care,\nthe snake winds from line to line:\nno braces are there."),
    ("What is the answer to everything?", "42"),
    ("What is two plus two?", "Two plus two is four."),
    ("What is the Zen of Python?", "Beautiful is better than ugly.\nExplicit is better than implicit.\nSimple is better than complex."),
)
