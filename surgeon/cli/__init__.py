"""The command line: parse, call one public function, show its result. Only this package prints or exits.

Data goes to stdout, progress and errors to stderr. Exit codes: 0 done; 1 a bug in surgeon (`diff`: they differ); 2 bad
input or refused; 3 a promise does not hold; 130 interrupted.
"""

from surgeon.cli.commands import app as app
from surgeon.cli.commands import main as main
