#!/usr/bin/env bash
# Runs pytest on $WORKERS processes. A few failed tests run once more, alone: the tests start hundreds of processes, and
# a busy machine may stop one of them for minutes. What passes only the second time is listed as unstable.
# Rewriting 6,000 assertions so that they show their values takes a third of the collection's time on a fresh machine.
# So the first run shows local variables instead, and the second one rewrites.
set -uo pipefail
python=$VENV/bin/python failed=$VENV/.failed-tests
at_most=8

rm -f "$failed"
"$python" -m pytest --assert=plain --showlocals --workers "$WORKERS" --write-failed "$failed" "$@"
code=$?
[[ $code == 1 && -s $failed && $(wc -l < "$failed") -le $at_most ]] || exit "$code"

echo "once more, alone: $(wc -l < "$failed") failed tests"
"$python" -m pytest -m "" "@$failed" || exit
echo "unstable (failed, then passed alone):"
sed 's/^/  /' "$failed"
