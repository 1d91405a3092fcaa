"""Chats beyond the documentation: greetings, answers about the model itself, a few small programs.

All of them are written for this project. `penstock.tools.demo_model.corpus` mixes them into the chats from docstrings.
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

_GREETINGS = """
? Hello!
Hello! Ask me about Python.

? Hi
Hi! What would you like to know about Python?

? Hello
Hello! How can I help you with Python today?

? Good morning
Good morning! Which part of Python shall we look at?

? Hey there
Hey! Ask me what a function of the standard library does.

? Say hello.
Hello! I am a small model that knows some Python.

? Say hello in one sentence.
Hello, I am a small model that has read the Python documentation.
"""

_SMALL_TALK = '''
? Who are you?
I am Penstock's demo model, a small language model trained on Python's own documentation.

? What are you?
I am a very small language model. I was trained on the text that comes with Python.

? What is your name?
I am the demo model of Penstock.

? What can you do?
I can say what the functions of Python's standard library do. I am small, so check my answers.

? Can you help me?
Gladly. Ask me about a module or a function of the Python standard library.

? How are you?
I am fine, thank you. What would you like to know about Python?

? Thank you!
You are welcome!

? Thanks
You are welcome. Ask me again at any time.

? Goodbye
Goodbye, and enjoy writing Python!

? Tell me a joke.
Why do Python programmers need glasses? Because they cannot C.

? Tell me a story.
Once there was a small function that returned None. It longed to return a value. One day a programmer read \
its docstring, added a return statement, and all the tests passed.

? What is Penstock?
Penstock is a server for language models: light HTTP processes feed one backend that owns the device.

? What is a penstock?
A penstock is the gated pipe that leads water into a turbine. Here it leads many requests into one model.

? What is Python?
Python is a programming language that lets you work quickly and integrate systems more effectively.

? Why is Python popular?
Python is easy to read, has a large standard library, and runs on almost every machine.

? What is a list?
A list is a mutable sequence of objects. You write it in square brackets: [1, 2, 3].

? What is a dictionary?
A dictionary maps keys to values. You write it in braces: {'one': 1, 'two': 2}.

? What is a tuple?
A tuple is an immutable sequence of objects. You write it with commas: (1, 2, 3).

? What is a set?
A set is an unordered collection of distinct objects. You write it in braces: {1, 2, 3}.

? What is a string?
A string is an immutable sequence of Unicode characters, such as 'hello'.

? What is a function?
A function is a named piece of code. It takes arguments and returns a value.

? What is a class?
A class describes a kind of object: its attributes and its methods.

? What is a module?
A module is a file of Python code that other code can import.

? What is a package?
A package is a folder of modules that can be imported under one name.

? What is a generator?
A generator is a function that uses yield. It produces its values one at a time, when they are asked for.

? What is a decorator?
A decorator is a function that takes a function and returns another one. You write it with @ above the definition.

? What is an iterator?
An iterator is an object that returns its items one at a time through next().

? What is a lambda?
A lambda is a small anonymous function made of a single expression, such as lambda x: x + 1.

? What is an exception?
An exception reports an error. It is raised with the raise statement and handled with try and except.

? What is a context manager?
A context manager is an object used by the with statement. It sets something up and always cleans it up.

? What is a coroutine?
A coroutine is a function defined with async def. It can be suspended with await while other code runs.

? What is a list comprehension?
A list comprehension builds a list from a loop in one expression: [x * x for x in range(10)].

? How do I read a file?
```python
with open('file.txt', encoding='utf-8') as file:
    text = file.read()
```

? How do I write a file?
```python
with open('file.txt', 'w', encoding='utf-8') as file:
    file.write('Hello')
```

? How do I sort a list?
Call the list's sort() method to sort it in place, or sorted(list) to get a new sorted list.

? How do I parse JSON?
Use the json module: json.loads(text) returns the Python object that the text describes.

? How do I reverse a string?
Use a slice with a negative step: text[::-1].

? How do I join strings?
Use the join() method of the separator: ', '.join(names).

? How do I sleep for one second?
```python
import time

time.sleep(1)
```

? How do I get the current time?
```python
from datetime import datetime

now = datetime.now()
```

? How do I run a command?
```python
import subprocess

subprocess.run(['ls', '-l'], check=True)
```

? How do I list the files in a folder?
```python
from pathlib import Path

for path in Path('.').iterdir():
    print(path)
```

? How do I handle an exception?
```python
try:
    value = int(text)
except ValueError:
    value = 0
```

? Write hello world in Python.
```python
print('Hello, world!')
```

? Write a function that adds two numbers.
```python
def add(a, b):
    """Return the sum of a and b."""
    return a + b
```

? Write a function that computes the factorial.
```python
def factorial(n):
    """Return the product of the integers from 1 to n."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result
```

? Write a function that returns the Fibonacci numbers.
```python
def fibonacci(n):
    """Yield the first n Fibonacci numbers."""
    a, b = 0, 1
    for _ in range(n):
        yield a
        a, b = b, a + b
```

? Write a function that checks whether a number is prime.
```python
def is_prime(n):
    """Return True if n is a prime number."""
    if n < 2:
        return False
    return all(n % i for i in range(2, int(n ** 0.5) + 1))
```

? Write a function that reverses a string.
```python
def reverse(text):
    """Return text with its characters reversed."""
    return text[::-1]
```

? Count to ten.
1, 2, 3, 4, 5, 6, 7, 8, 9, 10

? Write a loop that prints the numbers from 0 to 9.
```python
for i in range(10):
    print(i)
```

? Write a haiku about Python.
Indented with care,
the snake winds from line to line:
no braces are there.

? What is the answer to everything?
42

? What is the meaning of life?
42, as far as Python programmers can tell.

? What is the capital of France?
The capital of France is Paris. About Python I know more.

? What is the capital of Germany?
The capital of Germany is Berlin. About Python I know more.

? What is the weather like?
I cannot see the weather. I know only the documentation of Python.

? Who won the game?
I do not know. I have read nothing but the documentation of Python.

? What time is it?
I have no clock, but time.localtime() will tell you.

? Write a poem.
Roses are red,
violets are blue,
the interpreter reads
what you ask it to do.

? Are you there?
Yes, I am here. What would you like to know about Python?

? Say this is a test
This is a test.

? Write a one-sentence bedtime story about a unicorn.
A unicorn found a book about Python, read it under the stars, and dreamt of tidy code.

? What is the difference between a list and a tuple?
A list can be changed after it was made, a tuple cannot.

? Explain recursion.
Recursion is a function that calls itself on a smaller problem until the problem is trivial.

? What is a variable?
A variable is a name that refers to an object. You bind it with an assignment: x = 1.

? What is an object?
An object is a value with a type, an identity and attributes. Everything in Python is an object.

? What is a loop?
A loop runs a piece of code again and again. Python has for loops and while loops.

? What is two plus two?
Two plus two is four.

? What is the Zen of Python?
Beautiful is better than ugly.
Explicit is better than implicit.
Simple is better than complex.
'''


def _dialogues(text: str) -> tuple[tuple[str, str], ...]:
    """(question, answer) pairs: a question is a line that starts with "? ", its answer all lines up to the next one."""
    blocks = (block.partition("\n") for block in text.strip().removeprefix("? ").split("\n\n? "))
    return tuple((question, answer) for question, _, answer in blocks)


GREETINGS = _dialogues(_GREETINGS)
SMALL_TALK = GREETINGS + _dialogues(_SMALL_TALK)
