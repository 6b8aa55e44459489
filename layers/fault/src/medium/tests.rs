//! Twin tests of faults on a medium in RAM.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use futures_util::FutureExt;
use sealblock_block::{Clock, Medium, MediumError, MediumErrorKind};
use sealblock_media_memory::MemoryMedium;
use sealblock_runtime_memory::{Buffer, Slice};

use super::{Fault, FaultMedium};

const SECTORS: u64 = 64;

/// A clock whose delays end at once. It records them.
#[derive(Clone, Default)]
struct Slept(Rc<RefCell<Vec<Duration>>>);

impl Clock for Slept {
    async fn sleep(&self, delay: Duration) {
        self.0.borrow_mut().push(delay);
    }
}

type Faulty = FaultMedium<MemoryMedium, Slept>;

fn faulty(rules: &str) -> Faulty {
    FaultMedium::new(MemoryMedium::new(SECTORS * 512, 512), rules.parse().unwrap(), Slept::default())
}

fn now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("RAM and this clock never wait")
}

fn kind<T>(result: Result<T, MediumError>) -> Option<MediumErrorKind> {
    result.err().map(|error| error.kind)
}

fn write(medium: &Faulty, first: u64, sectors: usize, byte: u8) -> Result<(), MediumError> {
    now(medium.write(first * 512, Slice::copy_from(&vec![byte; sectors * 512])))
}

fn read(medium: &Faulty, first: u64, sectors: usize) -> Result<Vec<u8>, MediumError> {
    let (result, buffer) = now(medium.read(first * 512, Buffer::zeroed(sectors * 512)));
    result.map(|()| buffer.to_vec())
}

/// The first byte of each of these sectors, as stored.
fn stored(medium: &Faulty, first: u64, sectors: u64) -> Vec<u8> {
    (first..first + sectors).map(|sector| medium.inner().peek(sector * 512, 1)[0]).collect()
}

#[test]
fn without_rules_for_it_a_request_goes_through() {
    let medium = faulty("read-error@60;lost-write@60;torn-write@60");
    write(&medium, 0, 60, 7).unwrap();
    assert_eq!(read(&medium, 0, 60).unwrap(), vec![7; 60 * 512]);
    assert_eq!((medium.len_bytes(), medium.sector_bytes(), medium.can_punch()), (SECTORS * 512, 512, true));
    now(medium.punch(0, 512)).unwrap();
    now(medium.zero(512, 512)).unwrap();
    now(medium.sync()).unwrap();
    assert_eq!(stored(&medium, 0, 3), [0, 0, 7]);
    assert!(medium.counts().iter().all(|(_, count)| count == 0));
}

#[test]
fn errors_name_the_first_sector_and_change_nothing() {
    let medium = faulty("read-error@5..6;write-error@10;no-space@20");
    let error = read(&medium, 0, 8).unwrap_err();
    assert_eq!((error.kind, error.offset_bytes), (MediumErrorKind::Failed, 5 * 512));
    assert!(read(&medium, 0, 5).is_ok());
    assert_eq!(kind(write(&medium, 8, 4, 1)), Some(MediumErrorKind::Failed));
    assert_eq!(kind(now(medium.punch(8 * 512, 2048))), Some(MediumErrorKind::Failed));
    assert_eq!(kind(now(medium.zero(20 * 512, 512))), Some(MediumErrorKind::NoSpace));
    assert!(stored(&medium, 0, SECTORS).iter().all(|&byte| byte == 0));
    assert!(write(&medium, 11, 9, 1).is_ok());
}

#[test]
fn flips_are_read_or_stored() {
    let ones = |bytes: &[u8]| bytes.iter().map(|byte| byte.count_ones()).sum::<u32>();
    let medium = faulty("flip@5;flip-write@9");
    write(&medium, 0, 16, 0).unwrap();
    let bytes = read(&medium, 4, 3).unwrap();
    assert_eq!((ones(&bytes[..512]), ones(&bytes[512..1024]), ones(&bytes[1024..])), (0, 1, 0));
    assert_eq!(ones(&medium.inner().peek(5 * 512, 512)), 0, "what is stored stays good");
    assert_eq!(ones(&medium.inner().peek(9 * 512, 512)), 1);
    assert_eq!(read(&medium, 5, 1).unwrap(), bytes[512..1024], "the same bit each time");
}

#[test]
fn a_torn_sector_is_new_in_front_and_old_behind() {
    let medium = faulty("seed=9;torn-write@5");
    medium.inner().poke(0, &[1; 16 * 512]);
    write(&medium, 4, 3, 2).unwrap();
    let sector = medium.inner().peek(5 * 512, 512);
    let new = sector.iter().take_while(|&&byte| byte == 2).count();
    assert!((1..512).contains(&new), "{new} bytes are new");
    assert!(sector[new..].iter().all(|&byte| byte == 1));
    assert_eq!(stored(&medium, 3, 5), [1, 2, 2, 2, 1], "the sectors around it are written");
    assert_eq!(medium.counts().of(Fault::TornWrite), 1);
}

#[test]
fn lost_sectors_stay_old_and_misdirected_ones_hit_another() {
    let medium = faulty("seed=5;lost-write@5;lost-write@7;misdirected-write@6");
    medium.inner().poke(0, &[1; SECTORS as usize * 512]);
    write(&medium, 4, 5, 2).unwrap();
    assert_eq!(stored(&medium, 5, 3).iter().filter(|&&byte| byte == 2).count() as u64 + outside(&medium), 1);
    let counts = medium.counts();
    assert_eq!((counts.of(Fault::LostWrite), counts.of(Fault::MisdirectedWrite)), (2, 1));
    assert_eq!(stored(&medium, 6, 1), [1], "the sector itself stays old");
    assert_eq!((stored(&medium, 4, 1), stored(&medium, 8, 1)), (vec![2], vec![2]));
}

/// The number of sectors outside the write that have new data.
fn outside(medium: &Faulty) -> u64 {
    let new = |first, sectors| stored(medium, first, sectors).iter().filter(|&&byte| byte == 2).count() as u64;
    new(0, 4) + new(9, SECTORS - 9)
}

#[test]
fn syncs_fail_get_lost_and_wait() {
    assert!(now(faulty("flip").sync()).is_ok());
    assert_eq!(kind(now(faulty("flush-error").sync())), Some(MediumErrorKind::Failed));
    let medium = faulty("lost-flush;delay=3ms;delay=5ms@7");
    assert!(now(medium.sync()).is_ok());
    assert!(read(&medium, 7, 1).is_ok());
    assert_eq!(*medium.clock.0.borrow(), [3, 8].map(Duration::from_millis));
    assert_eq!(medium.counts().of(Fault::LostFlush), 1);
}

#[test]
fn a_request_that_the_inner_medium_refuses_gets_no_fault() {
    let medium = faulty("torn-write;lost-write;misdirected-write;flip");
    assert_eq!(kind(write(&medium, SECTORS - 1, 2, 1)), Some(MediumErrorKind::PastEnd));
    assert_eq!(kind(read(&medium, SECTORS - 1, 2)), Some(MediumErrorKind::PastEnd));
    assert_eq!(kind(now(medium.write(100, Slice::copy_from(&[1; 512])))), Some(MediumErrorKind::Failed));
    assert_eq!(kind(now(medium.punch(u64::MAX - 511, 512))), Some(MediumErrorKind::PastEnd));
    assert!(medium.counts().iter().all(|(_, count)| count == 0));
}

#[test]
fn the_same_seed_meets_the_same_faults() {
    let history = |seed: u32| {
        let rules = format!("seed={seed};lost-write%20;misdirected-write%10;torn-write%10;flip-write%5");
        let medium = faulty(&rules);
        for round in 1..=20 {
            write(&medium, 0, SECTORS as usize, round).unwrap();
        }
        medium.inner().peek(0, SECTORS as usize * 512)
    };
    assert!(history(1) == history(1));
    assert!(history(1) != history(2));
}
