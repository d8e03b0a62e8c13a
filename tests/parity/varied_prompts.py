"""Fifty prompts that differ in language, length, kind and characters."""

_SHORT = [
    "The",
    "Hello",
    "def fibonacci(n):",
    "Once upon a time",
    "The capital of France is",
    "2 + 2 =",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,",
    "\n\n",
    "{",
    "Q: Why is the sky blue?\nA:",
    "import numpy as np\n\n",
    "Roses are red,",
    "E = mc^2 means that",
    "1, 1, 2, 3, 5, 8,",
    "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a pirate.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n"
    "<|im_start|>assistant\n",
]
_LANGUAGES = [
    "Die Würde des Menschen ist unantastbar.",
    "Il était une fois, dans un pays lointain,",
    "La ciudad más grande de España es",
    "日本の首都は東京です。人口は",
    "Москва — столица России, и",
    "한국의 수도는 서울입니다.",
    "中国最长的河流是长江,",
    "مرحبا بالعالم",
    "O rato roeu a roupa do rei de Roma",
    "😀😃😄 emoji are fun because 👩‍👩‍👧",
]
_TASKS = [
    "Write a Python function that reverses a string without using slicing, and explain each line.",
    "Translate to French: The weather is lovely today and we should go for a walk in the park.",
    "Summarize: The mitochondrion is an organelle found in most eukaryotic cells. It produces energy.",
    "List the planets of the solar system in order of their distance from the sun.",
    "Fix the bug: for i in range(10) print(i)",
    "Give a recipe for pancakes with the ingredients flour, milk, eggs and butter.",
    "What is the derivative of x^3 + 2x^2 - 5x + 7 with respect to x?",
    "Explain recursion to a five-year-old child in three sentences.",
    "Compose a haiku about the first snow of winter.",
    "Convert 100 degrees Fahrenheit to Celsius and show the calculation step by step.",
    "Write an email that declines a meeting politely and proposes another date next week.",
    "Who wrote the novel Pride and Prejudice, and when was it first published?",
]
_PARAGRAPHS = [
    "The river rises in the hills north of the town and runs for ninety miles before it meets the sea. ",
    "In 1869 a chemist arranged the known elements by weight and left gaps for those not yet found. ",
    "The function returns early when the list is empty, otherwise it splits the list into two halves. ",
    "Bread needs four things: flour, water, salt and time; of these, time is the hardest to come by. ",
    "Each train leaves on the hour, stops at six stations, and arrives forty-seven minutes later. ",
]
# 20 to 420 tokens: within one partition of keys, across its end, and over several
_LONG = [
    "".join(_PARAGRAPHS[(start + i) % len(_PARAGRAPHS)] for i in range(length)) + "In short,"
    for start, length in enumerate((1, 2, 3, 5, 6, 7, 9, 12, 16, 20))
]

PROMPTS = [*_SHORT, *_LANGUAGES, *_TASKS, *_LONG]
assert len(PROMPTS) == len(set(PROMPTS)) == 50
