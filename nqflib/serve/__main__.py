"""`python -m nqflib.serve`: the book on this machine, its figures to run again."""

import sys

from nqflib.serve.app import main

sys.exit(main())
