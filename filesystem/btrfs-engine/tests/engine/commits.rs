//! Empty transactions, and what is still in memory after many.

use futures_executor::block_on;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_proofs_btrfs_images::programs::{Mount, run};

use crate::disks::Disks;
use crate::files::{Kind, ROOT, assert_content, create, write};
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

/// The free space of block groups is forgotten when nobody needed it for some commits, and read again when somebody does.
#[test]
fn free_space_that_is_not_needed_is_forgotten() {
    const MIB: u64 = 1 << 20;
    let Some(disks) = Disks::make(1, 1536, &["-m", "single"]) else { return };
    let engine = block_on(Engine::open(&disks.open(), EngineOptions::default())).unwrap();
    let in_memory = || block_on(engine.inspect(|transaction| Ok(transaction.space.in_memory()))).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    // Each has some block groups, and holes.
    let files: Vec<u64> = (0..4).map(|index| create(&engine, &format!("file{index}"), Kind::NoCow)).collect();
    for ino in &files {
        for piece in 0..800 {
            block_on(engine.write_zeroes(ROOT, *ino, piece * MIB / 4, MIB / 4)).unwrap();
        }
        for _ in 0..300 {
            block_on(engine.punch(ROOT, *ino, random.u64(..800) * MIB / 4, MIB / 4)).unwrap();
        }
        block_on(engine.commit()).unwrap();
    }
    let (mut fewest, most) = (u64::MAX, in_memory());
    assert!(most.0 > 5 && most.1 > 100, "{most:?}");
    for round in 0..6_u8 {
        for _ in 0..12 {
            block_on(engine.set_read_only(ROOT, false)).unwrap();
            block_on(engine.commit()).unwrap();
        }
        fewest = fewest.min(in_memory().0);
        disks.assert_consistent();
        let ino = files[random.usize(..4)];
        let at = random.u64(..190) * MIB;
        block_on(engine.punch(ROOT, ino, at, 5 * MIB)).unwrap();
        write(&engine, ino, at + MIB, &[round; 100_000]);
        let found = block_on(engine.read(ROOT, ino, at + MIB - 10, 100_020)).unwrap();
        assert!(found[10..100_010].iter().all(|byte| *byte == round) && found[..10] == [0; 10]);
        block_on(engine.commit()).unwrap();
        disks.assert_consistent();
    }
    assert!(fewest < most.0 / 2, "{fewest} of {}", most.0);
    // All of it can be used, and freed.
    for ino in files {
        block_on(engine.truncate(ROOT, ino, 0)).unwrap();
        block_on(engine.commit()).unwrap();
    }
    let ino = create(&engine, "last", Kind::Plain);
    write(&engine, ino, 0, &[1; 300_000]);
    assert_content(&engine, ino, &[1; 300_000]);
    block_on(engine.commit()).unwrap();
    disks.assert_consistent();
    disks.assert_checked_by_program();
}
