"""The study's command."""

from scripts.studies.finetuning.study import main

raise SystemExit(main())
