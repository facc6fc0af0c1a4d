"""Twenty-four prompts of different kinds and lengths."""

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "List three colours:\n1.",
    "The three laws of motion were written down by",
    "Translate to French: Good morning, my friend.\n",
    "import numpy as np\n\nx = np.",
    "My favourite recipe for apple pie starts with",
    "Q: What is the largest planet of the solar system?\nA:",
    "In 1969, humans first",
    "The quick brown fox",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, count(*) FROM",
    "To be, or not to be,",
    "The mitochondria is",
    "Here is a short poem about autumn:\n",
    "Monday, Tuesday, Wednesday,",
    "A binary search tree is a data structure in which",
    "Photosynthesis turns light into",
    "She opened the door and saw",
    "2 + 2 = 4. 3 + 3 = 6. 4 + 4 =",
    "The history of the Roman Empire is long. It began, as the legend goes, with two brothers, "
    "Romulus and Remus, who were raised by a wolf on the banks of the river Tiber. The city that "
    "they founded grew from a handful of huts on seven hills into a republic of laws, roads and "
    "legions, and then into an empire that reached from Britain to Mesopotamia. When historians "
    "speak of its fall, they usually mean",
    "Instructions for a new employee. First, read the handbook. Second, meet your team. Third, set "
    "up your computer: install the editor, clone the repository, run the tests, and ask for help "
    "whenever something is unclear. Fourth,",
]
