"""Does the converted model still say what the original says?"""

from .difference import Difference
from .files import verify_files
from .models import verify_model
from .result import Comparison, Verification

__all__ = ["Comparison", "Difference", "Verification", "verify_files", "verify_model"]
