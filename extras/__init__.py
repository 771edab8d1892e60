"""Instruments around upipe.py and train.py: delete the folder, and those two still work.

Arrows go one way: train.py imports a module of this folder when a flag asks for it, and these
import upipe. What they need of the job is handed to them: `settings`, a train.Settings, which can
also make a model, and `job`, a train.Job."""
import json
from importlib.util import find_spec
from pathlib import Path

from upipe import BadInput, refuse

GIB = 2**30


def installed(package):
    try:
        return find_spec(package) is not None
    except ImportError:  # find_spec("a.b") imports a
        return False


def need(package, flag):
    refuse(not installed(package), f"{flag} needs {package}: pip install {package}")


def read_json(path):
    """The object in a file, {} if there is none. BadInput for all else."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {error}")
    if not isinstance(found, dict):
        raise BadInput(f"{path} must hold a JSON object, not a {type(found).__name__}")
    return found


def write_json(path, figures):
    if path:
        Path(path).write_text(json.dumps(figures, indent=1))
