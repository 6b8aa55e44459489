//! Empty transactions.

use futures_executor::block_on;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_proofs_btrfs_images::programs::{Mount, run};

use crate::disks::Disks;
use crate::{assert_scrubbed, share};

fn fill(disks: &Disks) {
    let mount = Mount::new(&disks.images, "noatime").unwrap();
    let noise: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(300_000).collect();
    for index in 0..60 {
        std::fs::create_dir_all(mount.path(&format!("d{}", index % 7))).unwrap();
        std::fs::write(mount.path(&format!("d{}/f{index}", index % 7)), &noise[index * 10..index * 2500 + 100])
            .unwrap();
    }
    run(
        "btrfs",
        ["subvolume".as_ref(), "snapshot".as_ref(), mount.path("").as_os_str(), mount.path("snap").as_os_str()],
    )
    .unwrap();
    std::fs::remove_file(mount.path("d1/f1")).unwrap();
    mount.sync().unwrap();
    mount.unmount().unwrap();
    disks.load();
}

#[test]
fn empty_transactions_leave_the_filesystem_as_it_was() {
    for (devices, options) in [
        (1, &["-m", "single"][..]),
        (1, &["-m", "dup", "-n", "4096"]),
        (1, &["--mixed", "-n", "4096"]),
        (1, &["-m", "single", "--csum", "blake2", "-n", "65536"]),
        (2, &["-m", "raid1", "-d", "raid1", "--csum", "xxhash"]),
        (4, &["-m", "raid10", "-d", "raid0", "--csum", "sha256"]),
    ] {
        let Some(disks) = Disks::make(devices, 256, options) else { return };
        fill(&disks);
        let before = disks.open().superblock().generation.get();
        let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
        assert_eq!(engine.durable_generation(), before + 3);
        disks.assert_consistent();
        for round in 0..share(200) as u64 {
            assert_eq!(block_on(engine.commit()).unwrap(), before + 4 + round);
            if round % 20 == 0 {
                disks.assert_consistent();
            }
        }
        disks.assert_checked_by_program();
        let mount = Mount::new(&disks.images, "noatime").unwrap();
        assert_scrubbed(&mount);
        std::fs::write(mount.path("of the kernel"), vec![1; 100_000]).unwrap();
        mount.unmount().unwrap();
        disks.load();
        block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
        disks.assert_consistent();
    }
}
