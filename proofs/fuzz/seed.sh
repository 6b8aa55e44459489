#!/bin/sh
# Writes small first inputs for the targets that read text into corpus/. The other targets make their own good inputs.
set -eu
cd "$(dirname "$0")"

seed() {
    folder="corpus/$1"
    mkdir -p "$folder"
    number=0
    while IFS= read -r line; do
        number=$((number + 1))
        printf '%s' "$line" >"$folder/seed-$number"
    done
}

seed target <<'END'
volume.seal
file:/var/lib/volume
mem:1GiB
null:4096
/dev/nvme0n1
nvme+tcp://host:4420/nqn.2026-11.test:a/1
nvme+tcp://[::1]/nqn.2026-11.test%3Aa
nbd://host:10809/export%20name
mirror:a,b
stripe:[mirror:a,b],[mirror:c,d]
multipath:nbd://a/x,nbd://b/x
offset:0..99,mem:1MiB
fault:[seed=7;flip@5],mem:1MiB
[[volume]]
END
seed rules <<'END'
seed=7;read-error@100..200
flip@5
lost-write%0.01
delay=10ms@0..99
seed=1;torn;misdirected%5
END
