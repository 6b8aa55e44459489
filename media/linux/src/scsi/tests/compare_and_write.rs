//! COMPARE AND WRITE: when it is used, what the replies mean, and that it is never sent twice if it may have been
//! executed.

use sealblock_block::{Durability, Error, RequestKind};

use super::*;

impl Drive {
    /// `None` if the reply is lost.
    pub(super) fn compare_and_write(&self, blocks: &BlockCommand, data: &Transfer) -> Option<Answer> {
        let good = Answer { status: Status::GOOD, sense: None, host_status: 0, moved_bytes: 0 };
        if self.has(Habit::NoSwap) {
            return Some(self.refuse(AdditionalSense::INVALID_OPCODE));
        }
        let Some(extent) = blocks.extent().unwrap().filter(|extent| extent.fits(BLOCKS)) else {
            let is_taken = self.has(Habit::SwapsAnything);
            return Some(if is_taken { good } else { self.refuse(AdditionalSense::LBA_OUT_OF_RANGE) });
        };
        let swaps = self.sent.borrow().iter().filter(|one| matches!(one, Command::CompareAndWrite(_))).count();
        // The first one was sent at the opening.
        if self.has(Habit::IsBusy) && swaps <= 4 {
            return Some(Answer { status: Status::BUSY, ..good });
        }
        assert!(blocks.blocks <= u32::from(self.swap_blocks) && !blocks.protect.has_tuples());
        if let Some(bad) = self.bad_block(blocks) {
            return Some(bad);
        }
        let Transfer::Out(data) = data else { panic!("a COMPARE AND WRITE has data") };
        let length = extent.bytes(SIZE) as usize;
        assert_eq!(data.len(), 2 * length, "what is compared, and behind it what is written");
        let at = extent.start().get() as usize * SIZE.bytes();
        let mut stored = self.data.borrow_mut();
        if let Some(offset) = (0..length).find(|offset| stored[at + offset] != data[*offset]) {
            let information = match () {
                () if self.has(Habit::NamesNothing) => None,
                () if self.has(Habit::NamesAnother) => Some(1 << 40),
                () => Some(offset as u64),
            };
            let sense = Sense { information, ..Sense::new(SenseKey::MISCOMPARE, AdditionalSense::MISCOMPARE) };
            return Some(self.sense(sense));
        }
        stored[at..at + length].copy_from_slice(&data[length..]);
        match () {
            () if self.has(Habit::AbortsSwap) => {
                Some(self.sense(Sense::new(SenseKey::ABORTED_COMMAND, AdditionalSense::NONE)))
            }
            () if self.has(Habit::LosesSwap) => Some(Answer { host_status: 3, ..good }),
            () if self.has(Habit::LosesCall) => None,
            () if self.has(Habit::TakesHalf) => Some(Answer { moved_bytes: length, ..good }),
            () => Some(Answer { moved_bytes: data.len(), ..good }),
        }
    }
}

const KIND: RequestKind = RequestKind::CompareAndWrite;

/// A drive that reports to compare and write this many blocks at once.
fn swapping<F: Future<Output = ()>>(
    habits: &[Habit],
    protection: Option<ProtectionType>,
    swap_blocks: u8,
    test: impl FnOnce(OpenDrive) -> F,
) {
    let reactor = Reactor::new(Config::default()).expect("a reactor starts");
    reactor.block_on(async { test(opened(Drive { swap_blocks, ..drive(habits, protection) }).await).await });
}

fn stored(device: &ScsiDevice<Ordinary, Shared>, extent: Extent) -> Vec<u8> {
    let at = extent.start().get() as usize * 512;
    device.transport().0.data.borrow()[at..at + extent.bytes(SIZE) as usize].to_vec()
}

fn sealed(bytes: &[u8]) -> Sealed {
    Sealed::seal(Slice::copy_from(bytes), SIZE, None, &Tags::default())
}

async fn swap(device: &ScsiDevice<Ordinary, Shared>, at: Extent, expected: &[u8], new: u8) -> Result<(), Error> {
    let new = sealed(&vec![new; at.bytes(SIZE) as usize]);
    let request = Request::compare_and_write(at, sealed(expected), new, Durability::ForceUnitAccess);
    device.execute(request).await.map(|response| assert!(matches!(response, Response::Done)))
}

fn sent(device: &ScsiDevice<Ordinary, Shared>) -> Vec<BlockCommand> {
    let sent = device.transport().0.sent.borrow();
    let swaps = sent.iter().filter_map(|command| match command {
        Command::CompareAndWrite(blocks) => Some(*blocks),
        _ => None,
    });
    // The first one was sent at the opening.
    swaps.skip(1).collect()
}

#[test]
fn blocks_are_written_if_they_are_as_expected_and_the_first_difference_is_named() {
    for habits in [&[][..], &[Habit::NamesNothing], &[Habit::NamesAnother], &[Habit::Attentions]] {
        swapping(habits, None, 4, |device| async move {
            let device = device.unwrap();
            assert_eq!((device.abilities().of(KIND), device.info().max_compare_and_write_blocks), (Ability::Native, 4));
            let run = extent(10, 4);
            let before = stored(&device, run);
            for (at, lba) in [(0, 10), (700, 11), (2047, 13)] {
                let mut other = before.clone();
                other[at] ^= 1;
                let error = swap(&device, run, &other, 1).await.unwrap_err();
                assert_eq!(*error.kind(), ErrorKind::Miscompare { lba: Lba::new(lba) }, "{habits:?}");
            }
            assert_eq!(stored(&device, run), before, "nothing was written");
            assert!(device.transport().0.forgotten.borrow().is_empty(), "and nothing is stale");
            swap(&device, run, &before, 7).await.unwrap();
            assert!(stored(&device, run).iter().all(|byte| *byte == 7));
            assert_eq!(device.transport().0.forgotten.borrow()[..], [(10 * 512, 14 * 512)]);
            let last = *sent(&device).last().unwrap();
            assert_eq!((last.lba.get(), last.blocks, last.force_unit_access), (10, 4, true));
            // A block that cannot be read is named, and not written.
            harm(&device, &[(12, MEDIA.0)]);
            let bad = swap(&device, run, &[7; 2048], 8).await.unwrap_err().into_bad_blocks().unwrap();
            assert_eq!(bad.iter().map(|bad| bad.lba.get()).collect::<Vec<_>>(), [12]);
            assert!(stored(&device, run).iter().all(|byte| *byte == 7));
        });
    }
}

#[test]
fn a_drive_compares_and_writes_only_if_it_says_so_and_refuses_what_is_not_there() {
    let refused = |habits: &[Habit], protection, blocks, why: &'static str| {
        swapping(habits, protection, blocks, |device| async move {
            let device = device.expect("it is used all the same");
            assert_eq!((device.abilities().of(KIND), device.info().max_compare_and_write_blocks), (Ability::Absent, 0));
            let lines = device.info().refused.iter().filter(|line| line.starts_with("compare and write")).count();
            let refused = device.info().refused.join("; ");
            assert!(refused.contains(why) && lines == usize::from(!why.is_empty()), "{refused}");
        });
    };
    refused(&[], None, 0, "");
    refused(&[Habit::NoSwap], None, 1, "20h/00h");
    refused(&[Habit::SwapsAnything], None, 1, "behind the last one with GOOD");
    refused(&[Habit::SwapNeedsPrivilege], None, 1, "CAP_SYS_RAWIO");
    for protection in [ProtectionType::Type1, ProtectionType::Type2, ProtectionType::Type3] {
        refused(&[], Some(protection), 1, "tags of this host cannot travel");
    }
    // The kernel transfers 64 KiB at once here: half of them are compared.
    swapping(&[], None, 255, |device| async move {
        assert_eq!(device.unwrap().info().max_compare_and_write_blocks, 64);
    });
}

#[test]
fn none_is_sent_again_that_may_have_been_executed() {
    for habit in [Habit::AbortsSwap, Habit::LosesSwap, Habit::LosesCall] {
        swapping(&[habit], None, 1, |device| async move {
            let device = device.unwrap();
            let before = stored(&device, extent(10, 1));
            let error = swap(&device, extent(10, 1), &before, 7).await.unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Unreachable { .. }), "{habit:?}: {error}");
            assert!(error.to_string().contains("may have been executed"), "{habit:?}: {error}");
            assert_eq!(sent(&device).len(), 1, "{habit:?}");
            assert!(stored(&device, extent(10, 1)).iter().all(|byte| *byte == 7), "it was");
            assert_eq!(device.transport().0.forgotten.borrow().len(), 1, "{habit:?}: what is cached may be old");
        });
    }
    swapping(&[Habit::IsBusy], None, 1, |device| async move {
        let device = device.unwrap();
        let before = stored(&device, extent(10, 1));
        swap(&device, extent(10, 1), &before, 7).await.unwrap();
        assert_eq!(sent(&device).len(), 4, "a drive that is busy has not executed it");
    });
    swapping(&[Habit::TakesHalf], None, 1, |device| async move {
        let device = device.unwrap();
        let before = stored(&device, extent(10, 1));
        let error = swap(&device, extent(10, 1), &before, 7).await.unwrap_err();
        assert!(error.to_string().contains("512 of the 1024 bytes"), "{error}");
        assert_eq!(device.transport().0.forgotten.borrow().len(), 1);
    });
}
