"""`python -m zmqrl`."""

from zmqrl.cli import main

raise SystemExit(main())
