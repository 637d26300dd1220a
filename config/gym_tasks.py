"""The tasks of reasoning-gym that `data.generator.task` may name.

Left out: tasks whose scorer runs the answer as code (`eval`, sympy's parser), tasks that run programs, take long, draw
from a global random generator or in an order that Python's hash seed decides, and those whose problems do not survive
JSON. tests/workers/reward/test_gym.py holds the list to this.
"""

GYM_PREFIX = "reasoning_gym/"  # of the data source of such a row
GYM_TASKS = (
    # algorithmic
    "ab", "base_conversion", "binary_alternation", "caesar_cipher", "count_primes", "game_of_life", "group_anagrams",
    "jugs", "letter_counting", "letter_jumble", "manipulate_matrix", "number_filtering",
    "palindrome_generation", "palindrome_partitioning", "rotate_matrix", "sentence_reordering", "spell_backward",
    "word_sequence_reversal", "word_sorting",
    # arithmetic and algebra
    "chain_sum", "count_bits", "decimal_chain_sum", "fraction_simplification", "gcd", "lcm", "leg_counting",
    "number_format", "number_sequence", "power_function", "products", "simple_equations", "simple_geometry",
    # logic, graphs, games
    "aiw", "circuit_logic", "course_schedule", "emoji_mystery", "family_relationships", "maze", "mini_sudoku",
    "needle_haystack", "shortest_path", "syllogism", "tower_of_hanoi",
)  # fmt: skip
