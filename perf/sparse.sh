#!/bin/sh
# Measures bytes and time of large sparse volumes: created, zeroed and discarded as a whole, and with file systems that
# are made over NBD. Prints a table in Markdown.
#
#   perf/sparse.sh PROGRAM FOLDER [SIZE...]
#
# KINDS are the file systems [default: "ext4 xfs btrfs"]. FOLDER must be on a file system that supports files of these
# sizes (ext4 only up to 16 TiB; XFS and tmpfs do). Needs nbdfuse of libnbd, and mkfs.ext4, mkfs.xfs and mkfs.btrfs;
# missing programs are skipped. mkfs works on a FUSE file in front of the export, which never discards by itself, so
# everything that mkfs writes is new.
set -eu
program=$1 folder=$2
shift 2
[ $# -gt 0 ] || set -- 1TiB 20TiB
port=17809
volume=$folder/sparse-$$.volume
mount=$folder/sparse-$$.mount
trap 'unmounted 2>/dev/null; [ -z "${server:-}" ] || kill "$server" 2>/dev/null; rm -rf "$volume" "$mount"' EXIT
mkdir "$mount"

unmounted() { fusermount3 -u "$mount" 2>/dev/null || umount "$mount"; }

taken() { du --block-size=1 "$volume" | cut -f1; }

# mib BYTES
mib() { awk "BEGIN { printf \"%.1f MiB\", $1 / 1048576 }"; }

# timed NAME COMMAND...: prints a row of the table.
timed() {
  name=$1
  shift
  before=$(taken 2>/dev/null || echo 0)
  start=$(date +%s.%N)
  "$@" >/dev/null 2>&1 || name="$name (failed)"
  end=$(date +%s.%N)
  after=$(taken)
  echo "| $size | $name | $(mib $((after - before))) | $(mib "$after") | $(awk "BEGIN { printf \"%.2f s\", $end - $start }") |"
}

# made KIND OPTION...: makes a file system over NBD, after which the server closes the volume.
made() {
  kind=$1
  shift
  "$program" serve "$volume" --listen 127.0.0.1:0 --nbd 127.0.0.1:$port --control none >/dev/null 2>&1 &
  server=$!
  until nbdinfo --size "nbd://127.0.0.1:$port" >/dev/null 2>&1; do sleep 0.1; done
  mkdir -p "$mount" && nbdfuse "$mount" "nbd://127.0.0.1:$port" &
  fuse=$!
  until [ -e "$mount/nbd" ]; do sleep 0.1; done
  "mkfs.$kind" "$@" "$mount/nbd"
  unmounted
  wait "$fuse" || true
  kill "$server"
  wait "$server"
  server=
}

echo "| size | step | taken by it | taken then | time |"
echo "| --- | --- | ---: | ---: | ---: |"
for size in "$@"; do
  timed create "$program" create "$volume" --size "$size"
  timed "zero all" "$program" zero "$volume" --yes
  timed "discard all" "$program" discard "$volume" --yes
  for kind in ${KINDS:-ext4 xfs btrfs}; do
    command -v "mkfs.$kind" >/dev/null || continue
    case $kind in
      ext4) timed "mkfs.ext4" made ext4 -q -F -E nodiscard ;;
      xfs) timed "mkfs.xfs" made xfs -q -f -K ;;
      btrfs) timed "mkfs.btrfs" made btrfs -q -f -K ;;
    esac
    timed "discard all behind it" "$program" discard "$volume" --yes
    timed "zero all again" "$program" zero "$volume" --yes
  done
  rm "$volume"
done
