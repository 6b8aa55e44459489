#!/bin/busybox sh
# The first program of a guest: mounts file systems, loads modules, configures the network, then starts the agent, which
# runs scripts until the end.
/bin/busybox --install -s /bin
export PATH=/usr/bin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmp /dev/shm
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t debugfs debug /sys/kernel/debug 2>/dev/null
ln -s /proc/self/fd /dev/fd
for module in $(cat /modules/order); do
  insmod "/modules/$module.ko" 2>/tmp/insmod || echo "init: $module cannot be loaded: $(cat /tmp/insmod)"
done
rm -rf /modules
ip link set lo up
ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2
cd /root || exit 1
# Ends a guest whose harness was killed.
(sleep 1800; poweroff -f) >/dev/null 2>&1 </dev/null &
port=
for try in 1 2 3 4 5 6 7 8 9 10; do
  port=$(grep -lx agent /sys/class/virtio-ports/*/name 2>/dev/null | cut -d/ -f5)
  [ -n "$port" ] && [ -e "/dev/$port" ] && break
  sleep 0.2
done
exec /bin/conformance guest agent "/dev/$port"
