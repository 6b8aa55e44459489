//! Tests of the disk: synced writes survive everything; others may be lost, torn or mixed.

use super::*;
use crate::executor::{RunEnd, RunLimits};

const SECTOR: usize = 512;
const LIMITS: RunLimits = RunLimits { steps: 100_000, seconds: 100 };

/// Runs `work` on a blank disk; returns the image that `survival` leaves.
fn after<F: Future<Output = ()> + 'static>(
    seed: u64,
    behaviour: Behaviour,
    survival: Survival,
    work: impl FnOnce(SimDisk, Executor) -> F,
) -> (Image, IoCounts) {
    let random = Random::new(seed);
    let executor = Executor::new(random.fork("schedule"), Trace::default());
    let image = Image::blank(SECTOR as u32, 1 << 20);
    let disk = SimDisk::new(image, behaviour, &executor, random.fork("disk"), Trace::default());
    let ended = executor.run(LIMITS, work(disk.clone(), executor.clone()));
    assert!(matches!(ended, RunEnd::Finished(()) | RunEnd::Halted), "{ended:?}");
    let counts = disk.counts();
    (disk.power_off(survival, &random), counts)
}

fn sectors(byte: u8, count: usize) -> Slice {
    Slice::copy_from(&vec![byte; SECTOR * count])
}

/// The first byte of each of the first `count` sectors.
fn bytes(image: &Image, count: u64) -> Vec<u8> {
    let mut sector = [0; SECTOR];
    let mut first = |number| {
        image.read_sector(number, &mut sector);
        assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector is never torn");
        sector[0]
    };
    (0..count).map(&mut first).collect()
}

const EVERY_SURVIVAL: [Survival; 9] = [
    Survival::Nothing,
    Survival::Everything,
    Survival::Coin { percent: 50 },
    Survival::Prefix,
    Survival::AllButOne,
    Survival::LastWrites { writes: 1 },
    Survival::DiskLost { percent: 50 },
    Survival::DiskLost { percent: 100 },
    Survival::Kill,
];

#[test]
fn a_note_outlives_a_kill_and_a_boot_ends_with_a_power_cut_alone() {
    for survival in EVERY_SURVIVAL {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..60 {
            let (image, _) = after(seed, Behaviour::default(), survival, |disk, _| async move {
                disk.note(0, &[3; 4096]).unwrap();
            });
            seen.insert(bytes(&image, 1)[0]);
            let is_same_boot = matches!(survival, Survival::Kill | Survival::DiskLost { .. });
            assert_eq!(image.boot() == 1, is_same_boot, "{survival}");
        }
        // The note is the last write.
        let is_kept = matches!(survival, Survival::Kill | Survival::Everything | Survival::LastWrites { .. });
        assert_eq!(is_kept, !seen.contains(&0), "{survival}: {seen:?}");
    }
}

#[test]
fn a_machine_that_stops_before_a_note_gets_no_reply_and_leaves_no_note() {
    let behaviour = Behaviour { crash_at: Some(1), ..Behaviour::default() };
    let (image, _) = after(1, behaviour, Survival::Kill, |disk, executor| async move {
        disk.note(0, &[3; 4096]).unwrap();
        disk.note(4096, &[4; 4096]).unwrap();
        assert!(executor.is_halted());
    });
    assert_eq!(image.visible().count(), 0);
}

#[test]
fn synced_writes_survive_everything() {
    for survival in EVERY_SURVIVAL {
        for seed in 0..20 {
            let (image, _) = after(seed, Behaviour::default(), survival, |disk, _| async move {
                disk.write(0, sectors(1, 4)).await.unwrap();
                disk.write(0, sectors(2, 4)).await.unwrap();
                disk.sync().await.unwrap();
            });
            assert_eq!(bytes(&image, 5), [2, 2, 2, 2, 0], "{survival}");
        }
    }
}

#[test]
fn unsynced_writes_may_be_lost_kept_or_torn() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let survival = Survival::draw(&Random::new(seed));
        let (image, _) = after(seed, Behaviour::default(), survival, |disk, _| async move {
            disk.write(0, sectors(1, 2)).await.unwrap();
            disk.sync().await.unwrap();
            disk.write(0, sectors(2, 2)).await.unwrap();
        });
        seen.insert(bytes(&image, 2));
    }
    assert_eq!(Vec::from_iter(seen), [[1, 1], [1, 2], [2, 1], [2, 2]]);
}

#[test]
fn a_sync_does_not_cover_a_write_that_had_not_returned() {
    let mut lost = 0;
    for seed in 0..50 {
        let (image, _) = after(seed, Behaviour::default(), Survival::Nothing, |disk, executor| async move {
            let write = executor.spawn("write", {
                let disk = disk.clone();
                async move { disk.write(0, sectors(1, 1)).await.unwrap() }
            });
            disk.sync().await.unwrap();
            write.await;
        });
        lost += u64::from(bytes(&image, 1) == [0]);
    }
    assert_eq!(lost, 50);
}

#[test]
fn writes_that_overlap_in_time_mix_by_the_sector() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..300 {
        let (image, _) = after(seed, Behaviour::default(), Survival::Everything, |disk, executor| async move {
            let other = disk.clone();
            let one = executor.spawn("one", async move { other.write(0, sectors(1, 2)).await.unwrap() });
            disk.write(0, sectors(2, 2)).await.unwrap();
            one.await;
        });
        seen.insert(bytes(&image, 2));
    }
    assert_eq!(Vec::from_iter(seen), [[1, 1], [1, 2], [2, 1], [2, 2]]);
}

#[test]
fn zeroes_are_lost_like_any_other_write() {
    let run = |survival| {
        after(1, Behaviour::default(), survival, |disk, _| async move {
            disk.write(0, sectors(1, 3)).await.unwrap();
            disk.sync().await.unwrap();
            disk.punch(SECTOR as u64, SECTOR as u64).await.unwrap();
            disk.zero(2 * SECTOR as u64, SECTOR as u64).await.unwrap();
        })
        .0
    };
    assert_eq!(bytes(&run(Survival::Nothing), 3), [1, 1, 1]);
    assert_eq!(bytes(&run(Survival::Everything), 3), [1, 0, 0]);
}

#[test]
fn nothing_happens_after_the_machine_was_stopped() {
    for crash_at in 1..=6 {
        let behaviour = Behaviour { crash_at: Some(crash_at), ..Behaviour::default() };
        let (image, counts) = after(3, behaviour, Survival::Everything, |disk, _| async move {
            for i in 0..3 {
                disk.write(i * SECTOR as u64, sectors(1, 1)).await.unwrap();
            }
        });
        assert_eq!(counts.boundaries, crash_at);
        let whole = (crash_at - 1) / 2;
        let kept = bytes(&image, 3);
        assert!(kept[..whole as usize].iter().all(|byte| *byte == 1), "{crash_at}: {kept:?}");
        // The write in flight may be there; writes that were never issued must not.
        assert!(kept[whole as usize + 1..].iter().all(|byte| *byte == 0), "{crash_at}: {kept:?}");
    }
}

#[test]
fn after_a_kill_all_is_seen_and_only_a_sync_keeps_it() {
    let kill = || {
        after(1, Behaviour::default(), Survival::Kill, |disk, _| async move {
            disk.write(0, sectors(1, 1)).await.unwrap();
        })
        .0
    };
    for (sync, left) in [(true, 1), (false, 0)] {
        let executor = Executor::new(Random::new(1), Trace::default());
        let image = kill();
        assert_eq!(bytes(&image, 1), [1]);
        let disk = SimDisk::new(image, Behaviour::default(), &executor, Random::new(2), Trace::default());
        let other = disk.clone();
        executor.run(LIMITS, async move {
            if sync {
                other.sync().await.unwrap();
            }
        });
        assert_eq!(bytes(&disk.power_off(Survival::Nothing, &Random::new(3)), 1), [left]);
    }
}

#[test]
fn faults_hit_the_io_they_name() {
    let rule = |on, how| FaultRule { on, first: 2, count: 1, how, forgets: false };
    let faults = vec![rule(IoKind::Write, MediumErrorKind::NoSpace), rule(IoKind::Sync, MediumErrorKind::Failed)];
    let behaviour = Behaviour { faults, ..Behaviour::default() };
    let (image, counts) = after(1, behaviour, Survival::Nothing, |disk, _| async move {
        disk.write(0, sectors(1, 1)).await.unwrap();
        disk.sync().await.unwrap();
        let full = disk.write(SECTOR as u64, sectors(1, 1)).await.unwrap_err();
        assert_eq!((full.kind, full.offset_bytes), (MediumErrorKind::NoSpace, SECTOR as u64));
        disk.write(2 * SECTOR as u64, sectors(1, 1)).await.unwrap();
        assert_eq!(disk.sync().await.unwrap_err().kind, MediumErrorKind::Failed);
    });
    assert_eq!((bytes(&image, 3), counts.faults), (vec![1, 0, 0], 2));
}

#[test]
fn a_failed_sync_may_forget_for_good() {
    for (forgets, left) in [(false, 1), (true, 0)] {
        let rule = FaultRule { on: IoKind::Sync, first: 1, count: 1, how: MediumErrorKind::Failed, forgets };
        let behaviour = Behaviour { faults: vec![rule], ..Behaviour::default() };
        let (image, _) = after(1, behaviour, Survival::Nothing, |disk, _| async move {
            disk.write(0, sectors(1, 1)).await.unwrap();
            assert!(disk.sync().await.is_err());
            disk.sync().await.unwrap();
        });
        assert_eq!(bytes(&image, 1), [left]);
    }
}

#[test]
fn misuse_is_refused_and_forbidden_writes_are_found() {
    let behaviour = Behaviour { forbid_writes: true, ..Behaviour::default() };
    let random = Random::new(1);
    let executor = Executor::new(random.fork("schedule"), Trace::default());
    let disk = SimDisk::new(Image::blank(512, 4096), behaviour, &executor, random.fork("disk"), Trace::default());
    let other = disk.clone();
    let ended = executor.run(LIMITS, async move {
        let past = other.read(4096, Buffer::zeroed(512)).await.0;
        assert_eq!(past.unwrap_err().kind, MediumErrorKind::PastEnd);
        assert!(other.clone().finding().is_none());
        other.write(0, sectors(1, 1)).await.unwrap();
    });
    assert!(matches!(ended, RunEnd::Finished(())));
    assert!(disk.finding().is_some_and(|finding| finding.contains("by a reader")));
}
