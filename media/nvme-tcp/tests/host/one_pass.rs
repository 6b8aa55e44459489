//! Counts how often a CRC is computed over each byte: with the 32-bit guard and data digests once at each end, in both
//! directions; with other guards a second time.

use crate::common::*;
use sealblock_block::{Device, Durability, Gate, Request};
use sealblock_exports_nvme_tcp::{ChecksumStats, PiVisibility};
use sealblock_integrity::{Checks, Field, GuardKind, PiFormat, ProtectionType, Sealed, Unverified};
use sealblock_media_nvme_tcp::{NvmeTcpDevice, Options, PiSource};
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

const SIZE: BlockSize = BlockSize::B4096;
/// One that fits into a capsule, and one that is fetched and takes several PDUs.
const RUNS: [(u64, u64); 2] = [(3, 1), (100, 250)];

fn type1(guard: GuardKind) -> PiFormat {
    PiFormat::with_default_storage_tag(guard, ProtectionType::Type1)
}

/// Bytes that the host transferred, and bytes over which it computed a CRC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Cost {
    moved: u64,
    summed: u64,
}

struct Meter<'a> {
    device: &'a Gate<NvmeTcpDevice>,
    before: Cost,
}

impl<'a> Meter<'a> {
    fn start(device: &'a Gate<NvmeTcpDevice>) -> Meter<'a> {
        Meter { device, before: now(device) }
    }

    fn cost(&self) -> Cost {
        let now = now(self.device);
        Cost { moved: now.moved - self.before.moved, summed: now.summed - self.before.summed }
    }
}

fn now(device: &Gate<NvmeTcpDevice>) -> Cost {
    let counters = device.device().counters();
    Cost { moved: counters.received_bytes + counters.sent_bytes, summed: counters.bytes_checksummed() }
}

fn digests(protection: PiSource) -> Options {
    Options { data_digest: true, protection, ..options() }
}

/// Bytes of the tags transferred with this many blocks.
fn tag_bytes(device: &impl Device, blocks: u64) -> u64 {
    blocks * device.geometry().protection.map_or(0, PiFormat::tuple_bytes) as u64
}

#[test]
fn tags_of_the_host_and_digests_take_one_pass_with_the_guard_of_the_digest_and_two_with_others() {
    run(|| async {
        for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
            let served = serve(&[(memory(SIZE, Some(type1(guard))), PiVisibility::Protected)]);
            let device = open(&served, 1, digests(PiSource::Host)).await;
            for (start, blocks) in RUNS {
                let (place, data) = (extent(start, blocks), blocks * 4096);
                let tags = tag_bytes(&device, blocks);
                let meter = Meter::start(&device);
                write(&device, place, 1).await.unwrap();
                // The writer has made a pass over the data to compute tags; the digest needs only a pass over the tags.
                let more = if guard == GuardKind::Crc32c { tags } else { data + tags };
                assert_eq!(meter.cost(), Cost { moved: data + tags, summed: more }, "write {guard}");
                let meter = Meter::start(&device);
                assert_eq!(
                    read(&device, place).await.unwrap().joined_data()[..],
                    sealed(&device, place, 1).joined_data()[..]
                );
                let more = if guard == GuardKind::Crc32c { 0 } else { data };
                assert_eq!(meter.cost(), Cost { moved: data + tags, summed: data + tags + more }, "read {guard}");
            }
            served.target.stop();
        }
    });
}

#[test]
fn without_tags_here_the_digest_is_the_only_pass() {
    run(|| async {
        for (format, shows) in [
            (None, PiVisibility::Plain),
            (Some(type1(GuardKind::Crc32c)), PiVisibility::Plain),
            (Some(type1(GuardKind::Crc32c)), PiVisibility::Protected),
            (Some(type1(GuardKind::Crc16)), PiVisibility::Protected),
        ] {
            let served = serve(&[(memory(SIZE, format), shows)]);
            for data_digest in [true, false] {
                let options = Options { data_digest, ..digests(PiSource::Target) };
                let device = open(&served, 1, options).await;
                for (start, blocks) in RUNS {
                    let data = blocks * 4096;
                    let cost = Cost { moved: data, summed: if data_digest { data } else { 0 } };
                    let meter = Meter::start(&device);
                    write(&device, extent(start, blocks), 2).await.unwrap();
                    assert_eq!(meter.cost(), cost, "write {format:?}");
                    let meter = Meter::start(&device);
                    read(&device, extent(start, blocks)).await.unwrap();
                    assert_eq!(meter.cost(), cost, "read {format:?}");
                }
            }
            served.target.stop();
        }
    });
}

/// A guard that was not compared with its data may be wrong, and then a digest combined from it would be wrong too.
#[test]
fn guards_that_were_not_checked_vouch_for_nothing() {
    run(|| async {
        let format = type1(GuardKind::Crc32c);
        let served = serve(&[(memory(SIZE, Some(format)), PiVisibility::Protected)]);
        let device = open(&served, 1, digests(PiSource::Host)).await;
        let (place, blocks) = (extent(8, 3), 3);
        let all = blocks * (4096 + 16);
        // Tags that disable checks, with guards that do not match.
        let data = pattern(3 * 4096, 9);
        let escaped = Unverified::new(data.clone(), Slice::copy_from(&[0xFF; 48]), SIZE, Some(format)).unwrap();
        let escaped: Sealed = escaped.verify(&Checks::full(format, place.start())).unwrap();
        let meter = Meter::start(&device);
        let write = Request::write(place, escaped, Durability::Volatile);
        device.execute(write).await.unwrap();
        assert_eq!(meter.cost(), Cost { moved: all, summed: all });
        let meter = Meter::start(&device);
        let back = read(&device, place).await.unwrap();
        assert_eq!((meter.cost(), &back.joined_data()[..]), (Cost { moved: all, summed: all }, &data[..]));
        // These are not checked either, and they are sent on.
        assert!(back.block_crcs().is_none());
        let meter = Meter::start(&device);
        let again = Request::write(place, back, Durability::Volatile);
        device.execute(again).await.unwrap();
        assert_eq!(meter.cost(), Cost { moved: all, summed: all });
        served.target.stop();
    });
}

/// Data that were read with digest and guard have verified tags, so they are sent on without another pass.
#[test]
fn data_that_was_read_is_sent_on_without_a_pass() {
    run(|| async {
        let format = type1(GuardKind::Crc32c);
        let served = serve(&[(memory(SIZE, Some(format)), PiVisibility::Protected)]);
        let device = open(&served, 1, digests(PiSource::Host)).await;
        let place = extent(40, 20);
        write(&device, place, 3).await.unwrap();
        let back = read(&device, place).await.unwrap();
        let meter = Meter::start(&device);
        let again = Request::write(place, back, Durability::Volatile);
        device.execute(again).await.unwrap();
        assert_eq!(meter.cost(), Cost { moved: 20 * (4096 + 16), summed: 20 * 16 });
        served.target.stop();
    });
}

/// Bytes that the target transferred and checksummed for one request.
async fn at_target<T>(served: &Served, work: impl Future<Output = T>) -> (T, ChecksumStats) {
    let nqn = SUBNQN.parse().unwrap();
    let before = served.target.checksum_stats(&nqn).unwrap();
    let done = work.await;
    let after = served.target.checksum_stats(&nqn).unwrap();
    let more = ChecksumStats {
        received_bytes: after.received_bytes - before.received_bytes,
        received_bytes_summed: after.received_bytes_summed - before.received_bytes_summed,
        sent_bytes: after.sent_bytes - before.sent_bytes,
        sent_bytes_summed: after.sent_bytes_summed - before.sent_bytes_summed,
        guard_bytes_summed: after.guard_bytes_summed - before.guard_bytes_summed,
        stored_bytes_checked: after.stored_bytes_checked - before.stored_bytes_checked,
    };
    (done, more)
}

#[test]
fn the_target_makes_and_checks_the_guard_of_the_digest_in_the_pass_of_the_digest_and_others_in_another() {
    run(|| async {
        for guard in [GuardKind::Crc16, GuardKind::Crc32c, GuardKind::Crc64] {
            for (shows, protection) in [
                (PiVisibility::Plain, PiSource::Auto),
                (PiVisibility::Protected, PiSource::Target),
                (PiVisibility::Protected, PiSource::Host),
            ] {
                let served = serve(&[(memory(SIZE, Some(type1(guard))), shows)]);
                let device = open(&served, 1, digests(protection)).await;
                for (start, blocks) in RUNS {
                    let what = format!("{guard} {shows:?} {protection:?} {blocks}");
                    let (data, tags) = (blocks * 4096, tag_bytes(&device, blocks));
                    let is_shared = guard == GuardKind::Crc32c;
                    let (wrote, cost) = at_target(&served, write(&device, extent(start, blocks), 4)).await;
                    wrote.unwrap();
                    let expected = ChecksumStats {
                        received_bytes: data + tags,
                        received_bytes_summed: data + tags,
                        guard_bytes_summed: if is_shared { 0 } else { data },
                        ..ChecksumStats::default()
                    };
                    assert_eq!(cost, expected, "write {what}");
                    let (back, cost) = at_target(&served, read(&device, extent(start, blocks))).await;
                    assert_eq!(
                        back.unwrap().joined_data()[..],
                        sealed(&device, extent(start, blocks), 4).joined_data()[..]
                    );
                    let expected = ChecksumStats {
                        sent_bytes: data + tags,
                        sent_bytes_summed: if is_shared { tags } else { data + tags },
                        stored_bytes_checked: data,
                        ..ChecksumStats::default()
                    };
                    assert_eq!(cost, expected, "read {what}");
                    let passes = if is_shared { 1 } else { 2 };
                    assert_eq!(cost.bytes_summed(), passes * data + tags, "read {what}");
                }
                served.target.stop();
            }
        }
    });
}

/// Blocks whose tags disable checks, and those that were never written, are sent with a digest of their bytes.
#[test]
fn the_target_sums_what_nobody_checked() {
    run(|| async {
        let served = serve(&[(memory(SIZE, Some(type1(GuardKind::Crc32c))), PiVisibility::Protected)]);
        for protection in [PiSource::Target, PiSource::Host] {
            let device = open(&served, 1, digests(protection)).await;
            let (back, cost) = at_target(&served, read(&device, extent(70, 5))).await;
            assert!(back.unwrap().joined_data().iter().all(|&byte| byte == 0));
            assert_eq!(cost.sent_bytes_summed, cost.sent_bytes);
        }
        served.target.stop();
    });
}

/// The CRCs are those of the received data, so wrong guards are found without another pass, and nothing is written.
#[test]
fn a_wrong_guard_is_found_from_the_sums_of_the_digest() {
    run(|| async {
        let format = type1(GuardKind::Crc32c);
        let served = serve(&[(memory(SIZE, Some(format)), PiVisibility::Protected)]);
        let device = open(&served, 1, digests(PiSource::Host)).await;
        for (start, blocks) in RUNS {
            let place = extent(start, blocks);
            write(&device, place, 6).await.unwrap();
            let good = sealed(&device, place, 7);
            let mut tags = good.joined_tags().to_vec();
            *tags.last_chunk_mut::<16>().unwrap().first_mut().unwrap() ^= 1;
            let wrong = Unverified::new(good.joined_data(), Slice::copy_from(&tags), SIZE, Some(format)).unwrap();
            let wrong = wrong.verify(&Checks::NONE).unwrap();
            let attempt = Request::write(place, wrong, Durability::Volatile);
            let (refused, cost) = at_target(&served, device.execute(attempt)).await;
            let refused = refused.unwrap_err();
            let last = sealblock_units::Lba::new(start + blocks - 1);
            assert!(
                matches!(refused.kind(), sealblock_block::ErrorKind::Expectation { lba, field: Field::Guard, .. } if *lba == last),
                "{refused}"
            );
            assert_eq!(cost.guard_bytes_summed, 0);
            assert_eq!(
                read(&device, place).await.unwrap().joined_data()[..],
                sealed(&device, place, 6).joined_data()[..]
            );
        }
        served.target.stop();
    });
}
