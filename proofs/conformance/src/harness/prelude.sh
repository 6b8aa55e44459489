# Functions for scripts. PORT is the server's NVMe/TCP port, NBD_PORT its NBD port; 10.0.2.2 is the machine that runs
# the guest.
NQN=nqn.2026-11.io.sealblock

fail() {
  echo "FAIL: $*"
  exit 1
}

# random BYTES: prints data that do not repeat. The kernel's random bytes come at only 3 MB/s in an emulated machine.
random() {
  conformance guest random "$1"
}

# subsystem NAME: prints the folder of a connected subsystem in sysfs.
subsystem() {
  for folder in /sys/class/nvme-subsystem/*; do
    [ "$(cat "$folder/subsysnqn" 2>/dev/null)" = "$NQN:$1" ] && echo "$folder" && return 0
  done
  return 1
}

# attached NAME: waits for the block device of namespace 1 and prints its name, such as nvme0n1.
attached() {
  for try in $(seq 100); do
    folder=$(subsystem "$1") && device=$(ls "$folder" | grep -E '^nvme[0-9]+n[0-9]+$' | head -n 1) &&
      [ -n "$device" ] && [ -e "/dev/$device" ] && echo "$device" && return 0
    sleep 0.1
  done
  fail "$1 has no device" >&2
}

# attach NAME [OPTION...]: connects and prints the name of the block device of namespace 1.
attach() {
  name=$1
  shift
  nvme connect --transport tcp --traddr 10.0.2.2 --trsvcid "$PORT" --nqn "$NQN:$name" "$@" >/tmp/connect 2>&1 ||
    { cat /tmp/connect >&2; fail "connecting to $name" >&2; }
  attached "$name"
}

# block NAME NSID: waits for the block device of a namespace and prints its name.
block() {
  for try in $(seq 200); do
    for folder in /sys/block/nvme*; do
      [ "$(cat "$folder/nsid" 2>/dev/null)" = "$2" ] || continue
      device=${folder##*/}
      [ -e "$(subsystem "$1")/$device" ] && [ -e "/dev/$device" ] && echo "$device" && return 0
    done
    sleep 0.1
  done
  fail "$1 has no namespace $2" >&2
}

# gone PATH: waits until the file no longer exists. If it stays, the kernel logs which of its tasks wait, and for what.
gone() {
  for try in $(seq 600); do
    [ -e "$1" ] || return 0
    sleep 0.1
  done
  grep -H . /sys/class/nvme/nvme*/state /sys/class/nvme/nvme*/subsysnqn || true
  echo w >/proc/sysrq-trigger
  dmesg | tail -n 80
  fail "$1 stays"
}

# controller DEVICE: prints the first controller of a block device, such as nvme0.
controller() {
  basename "$(ls -d /sys/class/nvme-subsystem/*/"$1"/../nvme*[0-9] | grep -E '/nvme[0-9]+$' | head -n 1)"
}

# drive SERIAL: prints the block device of one of the guest's own NVMe drives.
drive() {
  for folder in /sys/class/nvme/nvme*; do
    [ "$(tr -d ' ' <"$folder/serial")" = "$1" ] || continue
    number=${folder##*/nvme}
    echo "/dev/nvme${number}n1" && return 0
  done
  fail "there is no drive $1"
}

# detach NAME: disconnects.
detach() {
  nvme disconnect --nqn "$NQN:$1" >/tmp/disconnect 2>&1 || { cat /tmp/disconnect; fail "disconnecting $1"; }
}

# flush DEVICE: sends a Flush command. The kernel's own sync sends none if nothing is dirty.
flush() {
  nvme flush "/dev/$1" --namespace-id=1 >/tmp/flush 2>&1 || { cat /tmp/flush; fail "flushing $1"; }
}

# refused WORD COMMAND...: the command must fail, with WORD in its output.
refused() {
  word=$1
  shift
  if "$@" >/tmp/refused 2>&1; then
    cat /tmp/refused
    fail "'$*' succeeded"
  fi
  grep -qi -- "$word" /tmp/refused || { cat /tmp/refused; fail "'$*' failed without saying '$word'"; }
}

# mark: ignores all kernel messages up to now.
mark() {
  MARK="conformance: mark $(cat /proc/sys/kernel/random/uuid)"
  echo "$MARK" >/dev/kmsg
  echo "$MARK" >/tmp/mark
}

# said: prints the kernel's messages since the mark, each line with its level, such as <6>.
said() {
  dmesg -r | sed "1,/$(cat /tmp/mark)/d"
}

# calm: fails if the kernel has logged a warning since the mark. Warnings about a slow machine do not count.
calm() {
  said | grep -E '^<[0-4]>' | grep -vE 'hrtimer: interrupt took|long keepalive RTT|clocksource|sched_clock' >/tmp/warnings || return 0
  cat /tmp/warnings
  fail "the kernel warns"
}

# load_works [NAME]: fails if the background load has ended. The load runs until /tmp/load.stop exists. When it ends, it
# leaves /tmp/load.status[.NAME], which contains `well` or `badly`, beside its own output and that of fio.
load_works() {
  [ ! -e "/tmp/load.status${1:+.$1}" ] ||
    { cat "/tmp/load.said${1:+.$1}" "/tmp/load${1:+.$1}"; fail "the load${1:+ on $1} has ended"; }
}

# load_ends [NAME]: stops the load, and fails if it did not end well.
load_ends() {
  touch /tmp/load.stop
  for try in $(seq 300); do
    [ -e "/tmp/load.status${1:+.$1}" ] && break
    sleep 0.2
  done
  [ "$(cat "/tmp/load.status${1:+.$1}")" = well ] ||
    { cat "/tmp/load.said${1:+.$1}" "/tmp/load${1:+.$1}"; fail "the load${1:+ on $1} did not survive"; }
}

# nbd_attach NAME DEVICE BLOCK_BYTES [CONNECTIONS]: attaches an export to an NBD device, such as nbd0; if BLOCK_BYTES is
# `default`, nbd-client chooses the block size. nbd-client does the handshake and leaves the rest to the kernel. (It
# crashes on `-C`, the short form of `--connections`.)
nbd_attach() {
  case "$3" in
    default) set -- "$1" "$2" "" "${4:-1}" ;;
    *) set -- "$1" "$2" "-b $3" "${4:-1}" ;;
  esac
  /usr/bin/nbd-client --connections "$4" $3 -N "$1" 10.0.2.2 "$NBD_PORT" "/dev/$2" >/tmp/nbd-client 2>&1 ||
    { cat /tmp/nbd-client; fail "connecting to the export $1"; }
  for try in $(seq 100); do
    [ "$(cat /sys/block/$2/size)" != 0 ] && return 0
    sleep 0.1
  done
  cat /tmp/nbd-client
  fail "$2 stays empty"
}

# nbd_detach DEVICE: disconnects.
nbd_detach() {
  /usr/bin/nbd-client -d "/dev/$1" >/tmp/nbd-client 2>&1 || { cat /tmp/nbd-client; fail "disconnecting $1"; }
  for try in $(seq 100); do
    [ -e /sys/block/$1/pid ] || return 0
    sleep 0.1
  done
  fail "$1 stays connected"
}
