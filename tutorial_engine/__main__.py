"""What can be called: `python -m tutorial_engine`."""

from tutorial_engine import __version__

COMMANDS = {
    "tutorial_engine.lab.doctor": "says whether this machine is set up, and what to do",
    "tutorial_engine.lab.real": "brings a real model (93 MB, once) and prints its folder",
    "tutorial_engine.parallel": "runs one model on two processes",
    "tutorial_engine.tiny.train": "trains the small model that ships (15 minutes)",
}

print(f"tutorial_engine {__version__}. In Python: from tutorial_engine import LLM; help(LLM)")
for module, does in COMMANDS.items():
    print(f"  python -m {module:<27} {does}")
