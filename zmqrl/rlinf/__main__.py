"""`python -m zmqrl.rlinf`."""

from zmqrl.rlinf import main

raise SystemExit(main())
