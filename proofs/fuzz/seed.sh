#!/bin/sh
# Writes small initial inputs into corpus/. Targets that are not listed here make their own valid inputs.
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

seed resume <<'END'
{"asked":{"target":"v","first":0,"last":9,"mode":"auto","repair":false},"identity":{"blocks":10,"block_size":4096,"protection":"guard","id":null},"parts":[{"first":0,"last":4,"started_unix_s":1,"ended_unix_s":2,"elapsed_s":1.5,"bytes_transferred":4096,"offloaded":false}],"checked":"seals","errors":[{"lba":3,"field":"guard","expected":"0x0001","actual":"0xffff","member":null,"repaired":false}],"errors_unlisted":0,"unchecked":[{"member":"a","first":0,"last":1,"why":"the member is offline"}],"lost_metadata":[]}
END

seed nqn <<'END'
nqn.2014-08.org.nvmexpress.discovery
nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6
nqn.2026-11.org.example:volume/1?a#b%41
END

# Inputs with bytes that are not text, in the octal escapes of printf. Arguments: the target's name, a name for the
# input, the format.
seed_bytes() {
    mkdir -p "corpus/$1"
    # shellcheck disable=SC2059 # The escapes are intended.
    printf "$3" >"corpus/$1/$2"
}
zeroes() {
    number=$1
    while [ "$number" -gt 0 ]; do
        printf '\\000'
        number=$((number - 1))
    done
}
# A capsule with a Write of 4096 bytes, and its data; and a response, data and an R2T for commands that a host has in
# flight.
capsule='\004\000\110\000\110\000\000\000\001\100\001\000\001\000\000\000'"$(zeroes 16)"'\000\000\000\000\000\000\000\000\000\020\000\000\000\000\000\132'"$(zeroes 24)"
seed_bytes nvme-tcp-target write "\\001\\377$capsule"'\006\004\030\030\030\020\000\000\001\000\000\000\000\000\000\000\000\020\000\000\000\000\000\000'
seed_bytes nvme-tcp-host read '\001\377\007\014\030\030\030\040\000\000\000\000\000\000\000\000\000\000\000\040\000\000\000\000\000\000'
seed_bytes nvme-tcp-host r2t '\001\377\011\000\030\000\030\000\000\000\001\000\000\000\000\000\000\000\000\040\000\000\000\000\000\000'
seed_bytes nvme-tcp-host response '\001\377\005\000\030\000\030\000\000\000'"$(zeroes 12)"'\000\000\000\000'
# Scripts: commands of each kind, continued until all are completed.
seed_bytes nvme-tcp-pair writes '\000\000\011\000\000\000\001\020\000\000\002\000\000\011\000\000\011\000\000\011\000\000'
seed_bytes nvme-tcp-pair digests '\160\025\011\000\000\000\003\377\003\000\002\000\000\011\000\001\011\000\001\011\000\000\007\000\000\000'
seed_bytes nvme-tcp-controller plain '\000\000\004\002\004\000\000\000\000\000\000\005\001\004\000\000\000\000\000\001'
seed_bytes nvme write "\\000$(printf '%s' "$capsule" | cut -c33-)"
seed_bytes nvme identify '\140'"$(zeroes 256)"
seed_bytes nvme discovery '\240\000\000\000\000\000\000\000\000\001'"$(zeroes 8)"
# Requests to a server in each style, including a write of 512 bytes; and replies to some of a client's requests.
request() { # style, flags, command, bytes: each in octal escapes
    case $1 in
    extended) printf '%s' '\041\344\034\161'"$2$3$(zeroes 16)"'\000\000\000\000'"$4" ;;
    *) printf '%s' '\045\140\225\023'"$2$3$(zeroes 16)$4" ;;
    esac
}
none='\000\000' block='\000\000\002\000' nothing='\000\000\000\000'
for style in '001 plain' '003 structured' '005 extended'; do
    first=${style% *} style=${style#* } payload=$none
    [ "$style" = extended ] && payload='\000\040'
    seed_bytes nbd-server "$style" "\\$first\\377$(request "$style" "$none" '\000\000' "$block")$(
        request "$style" "$payload" '\000\001' "$block"
    )$(zeroes 512)$(request "$style" "$none" '\000\003' "$nothing")$(
        request "$style" '\000\001' '\000\004' "$block"
    )$(request "$style" '\000\022' '\000\006' "$block")$(request "$style" '\000\010' '\000\007' "$block")"
done
simple() { # errno, ordinal of the request, place
    printf '%s' '\147\104\146\230\000\000\000'"$1"'\000\000\000'"$2"'\000\000\000'"$3"
}
chunk() { # style, flags and type, ordinal of the request and place, offset, bytes that follow
    case $1 in
    extended) printf '%s' '\156\212\047\214'"$2"'\000\000\000'"$3$4"'\000\000\000\000'"$5" ;;
    *) printf '%s' '\146\216\063\357'"$2"'\000\000\000'"$3$5" ;;
    esac
}
second='\002\000\000\000\001' seventh='\007\000\000\000\006' start=$(zeroes 8) at='\000\000\000\000\000\000\020\000'
seed_bytes nbd-client plain "\\040\\377$(simple '\000' '\002' '\001')$(zeroes 512)$(
    simple '\000' '\004' '\003'
)$(simple '\034' '\003' '\002')$(simple '\137' '\006' '\005')"
seed_bytes nbd-client structured "\\041\\377$(
    chunk structured '\000\000\000\001' "$second" "$start" '\000\000\001\010'
)$start$(zeroes 256)$(chunk structured '\000\001\200\002' "$second" "$start" '\000\000\000\016')$(
    printf '%s' '\000\000\000\005\000\000\000\000\000\000\000\000\001\000'
)$(chunk structured '\000\001\000\005' "$seventh" "$at" '\000\000\000\014')"'\000\000\000\007\000\000\020\000\000\000\000\003'
seed_bytes nbd-client extended "\\042\\377$(
    chunk extended '\000\001\000\001' "$second" "$start" '\000\000\002\010'
)$start$(zeroes 512)$(chunk extended '\000\001\000\006' "$seventh" "$at" '\000\000\000\030')"'\000\000\000\007\000\000\000\001\000\000\000\000\000\000\020\000\000\000\000\000\000\000\000\003'
