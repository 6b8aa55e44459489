//! Every fuzz target. Each `[[bin]]` of `Cargo.toml` builds this file, and its name chooses the function.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sealblock_fuzz::{block_map, btrfs, btrfs_edit, btrfs_filesystem, controller, image, labels, nvme, values, volume};
use sealblock_protocols_nbd::fuzz as nbd;
use sealblock_protocols_nvme_tcp::fuzz as nvme_tcp;

const TARGET: fn(&[u8]) = target(env!("CARGO_BIN_NAME"));

/// Returns the function of the target with this name.
const fn target(name: &str) -> fn(&[u8]) {
    match name.as_bytes() {
        b"superblock" => volume::try_superblock,
        b"container" => volume::try_container,
        b"log" => volume::try_log,
        b"block_map" => block_map::try_block_map,
        b"label" => labels::try_mirror_label,
        b"stripe_label" => labels::try_stripe_label,
        b"image" => image::try_image,
        b"resized" => image::try_resized,
        b"remains" => image::try_remains,
        b"tags" => values::try_tags,
        b"target" => values::try_target,
        b"rules" => values::try_rules,
        b"resume" => values::try_resume,
        b"nvme-tcp-target" => nvme_tcp::target,
        b"nvme-tcp-host" => nvme_tcp::host,
        b"nvme-tcp-pair" => nvme_tcp::pair,
        b"nvme-tcp-controller" => controller::try_controller,
        b"nbd-server" => nbd::run,
        b"nbd-client" => nbd::client::run,
        b"nvme" => nvme::try_structures,
        b"nqn" => nvme::try_name,
        b"scsi" => values::try_scsi,
        b"btrfs-superblock" => btrfs::try_superblock,
        b"btrfs-node" => btrfs::try_node,
        b"btrfs-item" => btrfs::try_item,
        b"btrfs-leaf-edit" => btrfs_edit::try_leaf_edit,
        b"btrfs-inner-edit" => btrfs_edit::try_inner_edit,
        b"btrfs-commit-record" => btrfs_edit::try_commit_record,
        b"btrfs-filesystem" => btrfs_filesystem::try_filesystem,
        b"btrfs-compressed" => btrfs::try_compressed,
        _ => panic!("a target has a function here"),
    }
}

fuzz_target!(|input: &[u8]| TARGET(input));
