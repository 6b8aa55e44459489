//! The engine on filesystems that `mkfs.btrfs` and the kernel made. What it commits is checked by our own check, by
//! `btrfs check`, and by the kernel, which mounts and scrubs it.
//!
//! Needs root, loop devices, `btrfs-progs` and the filesystem. Without these a test prints what is missing and is
//! skipped.

mod commits;
mod crash;
mod data;
mod data_concurrent;
mod data_faults;
mod disks;
mod drop;
mod faults;
mod faulty;
mod files;
mod items;
mod names;
mod releases;
mod scan;
mod subvolumes;
mod tasks;
