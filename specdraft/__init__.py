"""specdraft: from a target model and prompts to a vocabulary-efficient EAGLE-3 drafter whose speedup has been measured."""

__version__ = "0.1.0"
