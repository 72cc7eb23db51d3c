"""Varied user prompts, written for this purpose: to begin conversations with, and others to measure on.

Each entry is the user turns of one conversation.  The held-out ones share no template and no topic with the rest, nor
with the prompts that `eagle3 bench` measures on.
"""

from __future__ import annotations

from collections.abc import Iterator

from .samples import Conversation

Turns = tuple[str, ...]

OWN_SHARE = 5  # every so many-th conversation begins with a prompt from here, until all are used
TWO_TURNS = 4  # every so many-th conversation of the target's own has two user turns

PROMPTS: dict[str, tuple[Turns, ...]] = {
    "code": (
        ("Write a Python function that checks whether a string is a palindrome, ignoring case and punctuation.",),
        ("How do I reverse a linked list in C? Please show the code and describe what each pointer does.",),
        ("What is the difference between a list and a tuple in Python?", "And when would you use a set instead?"),
        ("I get `TypeError: 'NoneType' object is not subscriptable`. What does it mean and how do I track it down?",),
        ("Create an HTML page with a form for name, e-mail and a message. Keep the CSS in the same file.",),
        (
            "What does this print, and why?\n\n```python\nxs = [1, 2, 3]\nys = xs\nys.append(4)\nprint(len(xs))\n```",
            "Change it so that xs stays as it is.",
        ),
        ("Give me a SQL query that counts the orders of each customer in 2023, largest count first.",),
        ("Explain recursion with a small JavaScript example.",),
        ("Write a shell script which renames all .jpeg files of a folder to .jpg.",),
        ("Implement a stack class in Java with push, pop and peek. Add comments.",),
    ),
    "mathematics": (
        ("A shop sells apples at 3 for 2 euros. What do 15 apples cost?",),
        ("Solve for x: 4x - 7 = 21. Explain every step.",),
        ("What is the area of a circle whose diameter is 10 cm?", "What is its circumference?"),
        ("Is 91 a prime number? Justify your answer.",),
        ("Anna is twice as old as Ben. In six years their ages add up to 48. How old are they now?",),
        ("Convert 3/8 to a decimal and to a percentage.",),
        ("What is the probability of rolling at least one six with two dice?",),
        ("Describe what a derivative is, as if to someone who only knows straight lines.",),
        ("Find the mean, the median and the mode of 4, 8, 8, 15, 16, 23.",),
        ("If a tank fills in 4 hours through one pipe and in 6 through another, how long do both take together?",),
    ),
    "lists": (
        ("Name five animals that sleep during the day.",),
        ("Give me ten ideas for a cheap birthday party for teenagers.",),
        ("What are the planets of the solar system, from the smallest to the largest?",),
        ("List the steps for planting tomatoes on a balcony.", "Which of these do beginners get wrong most often?"),
        ("Make a table of four kinds of cheese with their country, milk and taste.",),
        ("What should I ask at a job interview? Six questions, please, one line each.",),
        ("Suggest three novels, three films and three records about loneliness.",),
        ("Which vegetables are in season in spring? Answer with bullet points only.",),
        ("Write a shopping list for a week of vegetarian dinners for two.",),
        ("Pros and cons of working from home, four of each.",),
    ),
    "rewriting": (
        ("Make this sentence shorter: Due to the fact that it was raining, we took the decision to stay inside.",),
        ("Correct the mistakes: She dont like apples but she eat it every days.",),
        ("Turn this into a formal e-mail: hey, can't come tomorrow, kid is sick, let's move the meeting to friday?",),
        (
            "Say the same in simple words: Photosynthesis converts electromagnetic energy into chemical energy"
            " stored in carbohydrates.",
        ),
        ("Rewrite in the past tense: The dog barks, the postman drops the letters and runs.",),
        (
            "Improve this product description: Good chair. It is made of wood. You can sit on it for long.",
            "Now make it sound less like an advertisement.",
        ),
        ("Change the voice from passive to active: The window was broken by the children during the game.",),
        ("Write this as a rhyming couplet: My cat ignores me until I open a tin.",),
        ("Translate into French: Where can I buy a ticket for the museum?",),
        ("Paraphrase three times: Practice matters more than talent.",),
    ),
    "summarising": (
        (
            "Summarise in one sentence: Bees visit flowers to gather nectar. On the way pollen sticks to their legs and"
            " is carried to the next flower. Without this service many fruits and nuts would not grow, which is why"
            " farmers rent hives in the blossoming season.",
        ),
        (
            "What are the main points? The council met on Tuesday. It agreed to repair the bridge, which will be closed"
            " from June to August. Buses will take the northern road. A second vote on the budget was postponed.",
        ),
        (
            "Give a title to this text: In the winter of 1954 the lake froze so hard that lorries drove across it. The"
            " villages on both shores held a market on the ice, and couples met who would never have met otherwise.",
            "Write the next two sentences of the story.",
        ),
        (
            "Key facts as bullets, please: The Great Wall was built over many centuries by several dynasties. It is not"
            " one wall but many. Its purpose was defence, but it also helped to control trade and migration.",
        ),
        (
            "tl;dr: I bought a used laptop online. The seller said the battery was new. It lasts twenty minutes. He"
            " does not answer my messages, and the platform says I should have complained within three days.",
        ),
        ("Summarise the plot of Romeo and Juliet in three sentences.",),
        (
            "Who did what? Mara lent her drill to Tom. Tom gave it to his sister, who broke it. Their father bought a"
            " new one and returned it to Mara.",
        ),
        ("In a few lines, what was the Industrial Revolution and why did it matter?",),
        (
            "Shorten to twenty words: Our gym opens at six on weekdays and at eight on weekends. Members may bring one"
            " guest per month free of charge. Towels cost one euro and the sauna is closed for repairs until May.",
        ),
        ("Explain the water cycle in one short paragraph.",),
    ),
    "chat": (
        ("Hi! How are you today?",),
        ("I can't sleep. Do you have any tips?", "I have tried that already. Anything else?"),
        ("Tell me a story about a robot who wants to become a gardener.",),
        ("Who are you and what can you do?",),
        ("My best friend forgot my birthday and I feel hurt. Should I say something?",),
        ("What is the capital of Australia?", "What is it known for?"),
        ("Can you recommend a hobby for someone with little time and less money?",),
        ("Pretend to be a pirate and describe your breakfast.",),
        ("why do cats purr",),
        ("I am moving to a new city next month and know nobody there. How do people make friends as adults?",),
    ),
}

HELD_OUT: dict[str, tuple[Turns, ...]] = {
    "code": (
        ("I need a regular expression for dates such as 2024-03-09. Break it down for me part by part.",),
        ("In Rust, why can't two mutable references to one value exist at the same time?",),
        ("Sketch a binary search in pseudocode.", "How many comparisons does it need for a million items?"),
    ),
    "mathematics": (
        ("Seven friends share a bill of 183.40. Two of them pay nothing. Work out each remaining share.",),
        ("Prove that the sum of two odd integers is even.",),
        ("By how much does 2000 grow in three years at a yearly interest of 5%, compounded?",),
    ),
    "lists": (
        ("Recommend eight board games for rainy evenings, and say in brackets how long each lasts.",),
        ("Plan a three-day visit to Lisbon, hour by hour.",),
        ("Which tools belong into a beginner's woodworking kit?",),
    ),
    "rewriting": (
        ("Tone this review down without losing the facts: The waiter was a disaster and the soup an insult!",),
        ("Put the following into the third person: I missed my flight, so I slept on a bench at the airport.",),
        (
            "Here is a haiku with a line that has too many syllables; mend it. Silent frozen pond / a single orange"
            " leaf is slowly drifting / the heron stands still",
        ),
    ),
    "summarising": (
        (
            "Boil this down for a busy reader. Penguins keep warm by huddling. The birds at the edge face the wind and"
            " shuffle inwards after a while, so that nobody stays outside for long. Researchers filmed a colony for"
            " months and found that the whole crowd moves like a slow wave.",
        ),
        ("What did the invention of the printing press change in Europe? Four sentences at most.",),
        (
            "Extract the date, the place and the price: Join our pottery evening at the old mill on 12 October. Clay"
            " and tea are included in the fee of 35 pounds; bring an apron.",
        ),
    ),
    "chat": (
        (
            "Evening! I just baked my first loaf of rye and it came out flat as a brick.",
            "So no more guessing then!",
        ),
        ("Imagine you could talk to whales. Which question would come first?",),
        ("Should a beginner learn the violin or the ukulele?",),
    ),
}


def prompts() -> list[Conversation]:
    """Conversations of user turns alone, one kind after the other in turn."""
    return _mixed(PROMPTS)


def held_out_prompts() -> list[Conversation]:
    """As `prompts`, to measure on: never train with these."""
    return _mixed(HELD_OUT)


def without_data(count: int) -> Iterator[Conversation]:
    """So many conversations for a target that gets no data: user turns for it to write (their content is empty), with
    the built-in prompts among them, each once."""
    given = iter(prompts())
    for number in range(count):
        conversation = next(given, None) if number % OWN_SHARE == 0 else None
        turns = 2 if number % TWO_TURNS == 1 else 1
        yield conversation or _users(("",) * turns)


def _mixed(kinds: dict[str, tuple[Turns, ...]]) -> list[Conversation]:
    return [_users(turns) for entries in zip(*kinds.values(), strict=True) for turns in entries]


def _users(turns: Turns) -> Conversation:
    return [{"role": "user", "content": turn} for turn in turns]
