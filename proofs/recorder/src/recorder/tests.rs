use super::*;
use crate::faults::Repeat;
use crate::log::Event;
use futures_executor::block_on;
use futures_util::FutureExt;
use futures_util::future::{join, join_all};
use sealblock_block::{Durability, Expectations};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_units::{BlockSize, Extent};

const SIZE: BlockSize = BlockSize::B4096;

fn recorder(options: Options) -> Recorder {
    Recorder::new(vec![Image::blank(SIZE, 64), Image::blank(SIZE, 64)], options)
}

fn extent(block: u64) -> Extent {
    Extent::from_raw(block, 1).unwrap()
}

fn write(block: u64, byte: u8) -> Request {
    let data = Sealed::seal(Slice::copy_from(&[byte; 4096]), SIZE, None, &Tags::default());
    Request::write(extent(block), data, Durability::Volatile)
}

/// The first and the last byte of a block, as a read returns them.
async fn read(device: &DynDevice, block: u64) -> [u8; 2] {
    match device.execute(Request::read(extent(block), Expectations::NONE)).await.unwrap() {
        Response::Data(data) => [data.joined_data()[0], data.joined_data()[4095]],
        other => panic!("{other:?}"),
    }
}

/// The events of ten concurrent writes and a flush.
fn concurrent(options: Options) -> (Log, Vec<Image>) {
    let recorder = recorder(options);
    let devices = recorder.devices();
    block_on(async {
        let writes = (0..10u8).map(|i| devices[usize::from(i % 2)].execute(write(u64::from(i), i + 1)));
        for outcome in join_all(writes).await {
            outcome.unwrap();
        }
        devices[1].execute(Request::flush()).await.unwrap();
    });
    recorder.mark("flushed");
    (recorder.log(), recorder.images())
}

#[test]
fn requests_complete_in_an_order_that_the_seed_determines() {
    let of = |seed| concurrent(Options { seed, ..Options::default() });
    let (log, images) = of(1);
    assert_eq!((log.events().len(), log.requests().len()), (23, 11));
    assert_eq!(log.events(), of(1).0.events());
    assert_ne!(log.events(), of(2).0.events());
    let ends = |log: &Log| -> Vec<usize> {
        let ends = log.events().iter().filter_map(|event| if let Event::End(id) = event { Some(id.0) } else { None });
        ends.collect()
    };
    assert!(!ends(&log).is_sorted(), "{:?}", ends(&log));
    assert_eq!(log.events().last(), Some(&Event::Mark("flushed".into())));
    for block in 0..10u8 {
        let mut byte = [0];
        images[usize::from(block % 2)].read(u64::from(block) * 4096, &mut byte);
        assert_eq!(byte, [block + 1]);
    }
    let in_place = concurrent(Options { yields: 0..=0, ..Options::default() }).0;
    assert!(ends(&in_place).is_sorted());
}

#[test]
fn a_flush_covers_what_ended_before_it_started_on_its_device() {
    let log = concurrent(Options::default()).0;
    let flush_end = log.requests()[10].ended;
    for (request, durable) in log.requests().iter().zip(log.durable_at()) {
        assert_eq!(durable, flush_end.filter(|_| request.device == 1 && !request.is_flush()), "{request}");
    }
}

#[test]
fn requests_fail_as_the_test_demands_and_store_what_it_demands() {
    for (stores, expected) in [(FailedWrite::Lost, [1, 1]), (FailedWrite::Stored, [2, 2])] {
        let recorder = recorder(Options::default());
        let device = recorder.device(1);
        recorder.inject(Fault::nth(2).on(1).of_kind(RequestKind::Write).storing(stores));
        block_on(async {
            recorder.device(0).execute(write(3, 9)).await.unwrap();
            device.execute(write(3, 1)).await.unwrap();
            let error = device.execute(write(3, 2)).await.unwrap_err();
            assert!(matches!(error.kind(), ErrorKind::Media { .. }), "{error}");
            assert_eq!(read(&device, 3).await, expected);
            device.execute(write(3, 3)).await.unwrap();
            assert_eq!(read(&device, 3).await, [3, 3]);
        });
        let log = recorder.log();
        assert_eq!(
            log.requests().iter().map(|request| request.failed).collect::<Vec<_>>(),
            [false, false, true, false]
        );
    }
}

#[test]
fn a_torn_failed_write_is_old_and_new_and_a_device_can_fail_for_ever() {
    let recorder = recorder(Options::default());
    let device = recorder.device(0);
    block_on(async {
        device.execute(write(0, 1)).await.unwrap();
        recorder.inject(Fault::nth(1).of_kind(RequestKind::Write).storing(FailedWrite::Torn));
        device.execute(write(0, 2)).await.unwrap_err();
        let mut block = [0; 4096];
        recorder.images()[0].read(0, &mut block);
        let new = block.chunks(512).filter(|sector| sector.iter().all(|byte| *byte == 2)).count();
        let old = block.chunks(512).filter(|sector| sector.iter().all(|byte| *byte == 1)).count();
        assert!(new > 0 && old > 0 && new + old == 8, "{new} new, {old} old sectors");
        recorder.inject(Fault::nth(1).on(0).repeated(Repeat::Forever));
        for request in [write(0, 3), Request::flush(), Request::read(extent(0), Expectations::NONE)] {
            device.execute(request).await.unwrap_err();
        }
        recorder.device(1).execute(write(0, 3)).await.unwrap();
        recorder.clear_faults();
        device.execute(Request::flush()).await.unwrap();
    });
}

#[test]
fn after_a_failed_flush_no_other_proves_anything_of_what_it_covered() {
    let recorder = recorder(Options::default());
    let device = recorder.device(0);
    recorder.inject(Fault::nth(1).of_kind(RequestKind::Flush));
    block_on(async {
        device.execute(write(0, 1)).await.unwrap();
        device.execute(Request::flush()).await.unwrap_err();
        device.execute(write(1, 1)).await.unwrap();
        device.execute(Request::flush()).await.unwrap();
    });
    let durable = recorder.log().durable_at();
    assert_eq!(durable.iter().map(Option::is_some).collect::<Vec<_>>(), [false, false, true, false]);
}

/// Discards a block, and commits three times. The block is written again after the first commit: before or after its
/// Discard has completed.
fn rewrite_discarded(waits: bool, discarded: Discarded) -> [u8; 2] {
    let recorder = recorder(Options { discarded, discard_delay: 3, ..Options::default() });
    let device = recorder.device(0);
    block_on(async {
        device.execute(write(7, 1)).await.unwrap();
        let discard = device.execute(Request::discard([extent(7)]));
        let commits = async {
            for round in 0..3 {
                device.execute(Request::flush()).await.unwrap();
                if round == 0 && !waits {
                    device.execute(write(7, 2)).await.unwrap();
                }
            }
        };
        let (discarded, ()) = join(discard, commits).await;
        discarded.unwrap();
        if waits {
            device.execute(write(7, 2)).await.unwrap();
        }
        read(&device, 7).await
    })
}

#[test]
fn a_delayed_discard_destroys_a_block_that_was_written_before_it_completed() {
    assert_eq!(rewrite_discarded(false, Discarded::Garbage), [0xA5; 2]);
    assert_eq!(rewrite_discarded(false, Discarded::Zeroes), [0; 2]);
    for discarded in [Discarded::Garbage, Discarded::Zeroes, Discarded::Kept, Discarded::Random] {
        assert_eq!(rewrite_discarded(true, discarded), [2, 2]);
    }
}

#[test]
fn a_delayed_discard_completes_even_if_nobody_flushes() {
    let recorder = recorder(Options { discard_delay: 3, ..Options::default() });
    block_on(recorder.device(0).execute(Request::discard([extent(7), extent(9)]))).unwrap();
    let log = recorder.log();
    let request = &log.requests()[0];
    assert!(request.landed.is_some() && [0, 2].contains(&request.pieces.len()));
}

#[test]
fn a_change_whose_future_is_dropped_lands_later_or_never() {
    let mut landed = 0;
    for seed in 0..40 {
        let recorder = recorder(Options { seed, yields: 3..=3, ..Options::default() });
        let device = recorder.device(0);
        block_on(async {
            let mut dropped = Box::pin(device.execute(write(1, 1)));
            assert!((&mut dropped).now_or_never().is_none());
            drop(dropped);
            let before = read(&device, 1).await;
            device.execute(write(2, 2)).await.unwrap();
            let after = read(&device, 1).await;
            assert!(before == [0, 0] && (after == [0, 0] || after == [1, 1]));
            landed += usize::from(after == [1, 1]);
            device.execute(Request::flush()).await.unwrap();
        });
        let log = recorder.log();
        assert_eq!((log.requests()[0].ended, log.durable_at()[0]), (None, None), "no flush covers it");
    }
    assert!((1..40).contains(&landed), "{landed} of 40 landed");
}

#[test]
fn requests_to_a_slow_device_end_after_those_to_the_other() {
    let recorder = recorder(Options::default());
    recorder.slow_down(0, 100);
    let devices = recorder.devices();
    block_on(async {
        let (slow, fast) = join(devices[0].execute(write(0, 1)), devices[1].execute(write(0, 1))).await;
        assert!(slow.is_ok() && fast.is_ok());
    });
    let log = recorder.log();
    assert!(log.requests()[0].ended > log.requests()[1].ended);
}
