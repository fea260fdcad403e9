"""python -m kvant"""

from kvant.cli import main

raise SystemExit(main())
