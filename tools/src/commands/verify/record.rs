//! What a verify remembers over an interruption, and its bytes, as drawn in `docs/formats/verify-resume.md`.
//!
//! The bytes lie in a file that anything may have written, so no field is used before the checksum and all fields are checked.
//!
//! Invariants: the parts of a record follow each other without a gap, from the first block of the range on; what was found in them
//! is in the record; a block behind them was not verified, whatever else is known of it.

use std::borrow::Cow;

use sealblock_integrity::guard::crc32c;
use sealblock_server::status::health::Checked;
use serde::{Deserialize, Serialize};

use crate::report::{BlockError, NotChecked, VerifiedPart};

/// What a file begins with.
const SIGNATURE: &str = "sealblock-verify-resume";
/// The version that is written and read.
const VERSION: &str = "2";
/// The version of earlier programs, which did not keep what state the target was in.
pub const EARLIER_VERSION: &str = "1";
/// Max. bytes of a file.
pub const MAX_BYTES: u64 = 64 << 20;
/// Max. bad blocks that are kept one by one; further ones are counted.
pub const MAX_ERRORS: usize = 1 << 16;
/// Max. runs of unchecked blocks; above it, runs of the same copy and reason are joined.
pub const MAX_UNCHECKED: usize = 1024;
/// Max. identities and states of what a target is made of.
pub const MAX_IDS: usize = 4096;
/// Max. parts; above it, the oldest ones are joined.
pub const MAX_PARTS: usize = 1024;

/// Which device a record is of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes of a block.
    pub block_size: u64,
    /// The protection, in words.
    pub protection: String,
    /// What distinguishes each device that it is made of from others: UUIDs, files, replicas of a mirror with their states.
    pub ids: Vec<String>,
    /// What changes with each opening that writes: counts of volumes, times of files.
    pub states: Vec<String>,
}

/// The request. A run resumes only if the same request is made again.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// The target in its canonical form.
    pub target: String,
    /// The first block of the range.
    pub first: u64,
    /// The last block of the range.
    pub last: u64,
    /// The value of `--mode`.
    pub mode: String,
    /// True with `--repair`.
    pub repair: bool,
}

/// What a verify remembers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// What was asked for.
    pub asked: Asked,
    /// Which device it is of.
    pub identity: Identity,
    /// The verified parts, in order.
    pub parts: Vec<VerifiedPart>,
    /// What they were checked against.
    pub checked: Checked,
    /// Bad blocks in them.
    pub errors: Vec<BlockError>,
    /// How many more are bad than `errors` lists.
    pub errors_unlisted: u64,
    /// Blocks in them of which a copy was not checked.
    pub unchecked: Vec<NotChecked>,
    /// Lost copies of metadata.
    pub lost_metadata: Vec<String>,
}

/// Why bytes are no record.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RecordError {
    /// Another file.
    #[error("it was not written by --resume")]
    Signature,
    /// A file of another version of the program.
    #[error("it has version {0}, and this program supports version {VERSION}")]
    Version(String),
    /// The bytes are not those that were written.
    #[error("its checksum does not match: it is damaged or was edited")]
    Checksum,
    /// The fields are no record, or do not fit each other.
    #[error("its checksum matches, but its content is invalid: {0}")]
    Content(Cow<'static, str>),
}

impl Record {
    /// A run that has not verified anything yet.
    pub fn new(asked: Asked, identity: Identity) -> Record {
        let (checked, errors, unchecked) = (Checked::Seals, Vec::new(), Vec::new());
        let (parts, lost_metadata) = (Vec::new(), Vec::new());
        Record { asked, identity, parts, checked, errors, errors_unlisted: 0, unchecked, lost_metadata }
    }

    /// The first block that was not verified: behind the last one of the range when all were.
    pub fn next(&self) -> u64 {
        self.parts.last().map_or(self.asked.first, |part| part.last + 1)
    }

    /// True if all blocks were verified.
    pub fn is_complete(&self) -> bool {
        self.next() > self.asked.last
    }

    /// Adds a part and what was found in it; bounds what is kept.
    pub fn add(&mut self, part: VerifiedPart, found: Record) {
        if self.parts.len() >= MAX_PARTS {
            let second = self.parts.remove(1);
            let first = &mut self.parts[0];
            first.last = second.last;
            first.ended_unix_s = second.ended_unix_s;
            first.elapsed_s += second.elapsed_s;
            first.bytes_transferred = first.bytes_transferred.saturating_add(second.bytes_transferred);
            first.offloaded &= second.offloaded;
        }
        self.parts.push(part);
        if found.checked == Checked::Readability {
            self.checked = Checked::Readability;
        }
        let room = MAX_ERRORS.saturating_sub(self.errors.len());
        let unlisted = found.errors.len().saturating_sub(room) as u64;
        self.errors.extend(found.errors.into_iter().take(room));
        self.errors_unlisted = self.errors_unlisted.saturating_add(unlisted).saturating_add(found.errors_unlisted);
        self.unchecked = join(std::mem::take(&mut self.unchecked), found.unchecked);
        let new = found.lost_metadata.into_iter().filter(|lost| !self.lost_metadata.contains(lost)).collect::<Vec<_>>();
        self.lost_metadata.extend(new);
    }

    /// The bytes of a file.
    pub fn encode(&self) -> Vec<u8> {
        // Infallible: no map has keys that are no texts.
        let mut content = serde_json::to_vec(self).unwrap_or_default();
        content.push(b'\n');
        Record::framed(&content)
    }

    /// The bytes of a file with this content, whatever it is: the checksum fits. For tests of what lies behind it.
    pub fn framed(content: &[u8]) -> Vec<u8> {
        let mut bytes = format!("{SIGNATURE} {VERSION} {:08x}\n", crc32c(content)).into_bytes();
        bytes.extend_from_slice(content);
        bytes
    }

    /// Reads the bytes of a file.
    ///
    /// # Errors
    /// When they are no record, in whole or in part.
    pub fn decode(bytes: &[u8]) -> Result<Record, RecordError> {
        let end = bytes.iter().take(128).position(|byte| *byte == b'\n').ok_or(RecordError::Signature)?;
        let head = std::str::from_utf8(&bytes[..end]).map_err(|_| RecordError::Signature)?;
        let words: Vec<&str> = head.split(' ').collect();
        let [SIGNATURE, version, checksum] = words[..] else { return Err(RecordError::Signature) };
        if version != VERSION {
            return Err(RecordError::Version(version.escape_default().to_string()));
        }
        let content = &bytes[end + 1..];
        if checksum != format!("{:08x}", crc32c(content)) {
            return Err(RecordError::Checksum);
        }
        let record: Record =
            serde_json::from_slice(content).map_err(|error| RecordError::Content(error.to_string().into()))?;
        record.check().map_err(|why| RecordError::Content(why.into()))?;
        Ok(record)
    }

    /// Says what does not match.
    fn check(&self) -> Result<(), &'static str> {
        let Asked { first, last, .. } = self.asked;
        if first > last || last >= self.identity.blocks {
            return Err("its range is not on its device");
        }
        let mut next = first;
        for part in &self.parts {
            if part.first != next || part.last < part.first || part.last > last {
                return Err("its parts do not follow each other");
            }
            if !part.elapsed_s.is_finite() || part.elapsed_s < 0.0 {
                return Err("a part has an impossible time");
            }
            next = part.last + 1;
        }
        if self.errors.iter().any(|error| error.lba < first || error.lba >= next) {
            return Err("a bad block is not in its parts");
        }
        if self.errors.iter().any(|error| error.files.is_some()) {
            return Err("a bad block has files, which are added only at the end");
        }
        // So that numbers of blocks can be added up.
        if self.errors_unlisted > u64::MAX / 4 {
            return Err("it has more bad blocks than the device has blocks");
        }
        if !self.errors.is_sorted_by_key(|error| error.lba) {
            return Err("its bad blocks are not in order");
        }
        if self.unchecked.iter().any(|run| run.first > run.last || run.first < first || run.last >= next) {
            return Err("unchecked blocks are not in its parts");
        }
        let bounds = [(self.parts.len(), MAX_PARTS), (self.errors.len(), MAX_ERRORS)];
        let more = [(self.unchecked.len(), MAX_UNCHECKED), (self.lost_metadata.len(), MAX_UNCHECKED)];
        let devices = [(self.identity.ids.len(), MAX_IDS), (self.identity.states.len(), MAX_IDS)];
        if bounds.into_iter().chain(more).chain(devices).any(|(there, most)| there > most) {
            return Err("it has too many entries");
        }
        let members = self.errors.iter().filter_map(|error| error.member.as_deref());
        let others = self.unchecked.iter().filter_map(|run| run.member.as_deref());
        let whys = self.unchecked.iter().map(|run| &*run.why);
        let texts = members.chain(others).chain(whys).chain(self.lost_metadata.iter().map(String::as_str));
        let mut texts = texts.chain(self.identity.ids.iter().chain(&self.identity.states).map(String::as_str));
        // They go to a terminal.
        if texts.any(|text| text.chars().any(char::is_control)) {
            return Err("a text has control characters");
        }
        Ok(())
    }
}

/// Joins runs of the same copy and reason that touch; above the limit, also those that do not.
pub(super) fn join(mut runs: Vec<NotChecked>, more: Vec<NotChecked>) -> Vec<NotChecked> {
    runs.extend(more);
    runs.sort_by(|a, b| (&a.member, &a.why, a.first).cmp(&(&b.member, &b.why, b.first)));
    let touching = |a: &NotChecked, b: &NotChecked| b.first <= a.last.saturating_add(1);
    let mut joined = joined_if(runs, touching);
    if joined.len() > MAX_UNCHECKED {
        joined = joined_if(joined, |_, _| true);
    }
    joined.truncate(MAX_UNCHECKED);
    joined.sort_by(|a, b| (a.first, a.last, &a.member).cmp(&(b.first, b.last, &b.member)));
    joined
}

fn joined_if(runs: Vec<NotChecked>, may: impl Fn(&NotChecked, &NotChecked) -> bool) -> Vec<NotChecked> {
    let mut joined: Vec<NotChecked> = Vec::with_capacity(runs.len());
    for run in runs {
        match joined.last_mut() {
            Some(last) if (&last.member, &last.why) == (&run.member, &run.why) && may(last, &run) => {
                last.last = last.last.max(run.last);
            }
            _ => joined.push(run),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Hex;
    use proptest::prelude::*;
    use sealblock_block::BadBlockCause;
    use sealblock_integrity::Field;

    fn part(first: u64, last: u64) -> VerifiedPart {
        let (started_unix_s, ended_unix_s) = (1_700_000_000, 1_700_000_060);
        VerifiedPart {
            first,
            last,
            started_unix_s,
            ended_unix_s,
            elapsed_s: 1.5,
            bytes_transferred: 4096,
            offloaded: false,
        }
    }

    fn error(lba: u64) -> BlockError {
        let hex = |value| Some(Hex::new(value, 32));
        let field = BadBlockCause::Tag(Field::Guard);
        BlockError {
            lba,
            field,
            expected: hex(1),
            actual: hex(0xffff_ffff),
            member: Some("a".to_owned()),
            repaired: false,
            files: None,
        }
    }

    fn run(first: u64, last: u64, member: &str) -> NotChecked {
        NotChecked { member: Some(member.to_owned()), first, last, why: "the member is offline".into() }
    }

    fn begun() -> Record {
        let asked = Asked { target: "v".to_owned(), first: 10, last: 99, mode: "auto".to_owned(), repair: false };
        let identity = Identity {
            blocks: 100,
            block_size: 4096,
            protection: "guard".to_owned(),
            ids: vec!["volume x".to_owned()],
            states: Vec::new(),
        };
        Record::new(asked, identity)
    }

    fn found() -> Record {
        Record { errors: vec![error(12), error(13)], unchecked: vec![run(10, 19, "b")], ..begun() }
    }

    fn written(record: &Record) -> Vec<u8> {
        record.encode()
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_parts_add_up() {
        let mut record = begun();
        assert_eq!((record.next(), Record::decode(&written(&record)).unwrap()), (10, record.clone()));
        record.add(part(10, 19), found());
        let second = Record { errors: vec![error(25)], unchecked: vec![run(20, 29, "b"), run(22, 23, "c")], ..begun() };
        record.add(part(20, 29), Record { checked: Checked::Readability, ..second });
        assert_eq!((record.next(), record.is_complete(), record.checked), (30, false, Checked::Readability));
        assert_eq!(record.errors.iter().map(|error| error.lba).collect::<Vec<_>>(), [12, 13, 25]);
        assert_eq!(record.unchecked, [run(10, 29, "b"), run(22, 23, "c")]);
        record.add(part(30, 99), begun());
        assert!(record.is_complete());
        assert_eq!(Record::decode(&written(&record)).unwrap(), record);
    }

    #[test]
    fn what_is_no_record_is_refused_for_what_it_is() {
        let mut record = begun();
        record.add(part(10, 19), found());
        let good = written(&record);
        assert_eq!(Record::decode(b""), Err(RecordError::Signature));
        assert_eq!(Record::decode(b"a file of something else\n"), Err(RecordError::Signature));
        let later = String::from_utf8(good.clone()).unwrap().replacen(" 2 ", " 3 ", 1);
        assert_eq!(Record::decode(later.as_bytes()), Err(RecordError::Version("3".to_owned())));
        assert_eq!(Record::decode(&good[..good.len() - 1]), Err(RecordError::Checksum));
        let mut flipped = good.clone();
        *flipped.last_mut().unwrap() ^= 1;
        assert_eq!(Record::decode(&flipped), Err(RecordError::Checksum));
    }

    #[test]
    fn fields_that_do_not_fit_each_other_are_refused_though_the_checksum_fits() {
        let mut good = begun();
        good.add(part(10, 19), found());
        let change = |change: &dyn Fn(&mut Record)| {
            let mut record = good.clone();
            change(&mut record);
            match Record::decode(&written(&record)) {
                Err(RecordError::Content(why)) => why.into_owned(),
                other => panic!("{other:?}"),
            }
        };
        assert!(change(&|record| record.asked.last = 100).contains("range"));
        assert!(change(&|record| record.parts[0].first = 9).contains("follow"));
        assert!(change(&|record| record.parts[0].last = 200).contains("follow"));
        assert!(change(&|record| record.parts.push(part(25, 30))).contains("follow"));
        assert!(change(&|record| record.parts[0].elapsed_s = -1.0).contains("time"));
        assert!(change(&|record| record.errors[1].lba = 20).contains("not in its parts"));
        assert!(change(&|record| record.errors.swap(0, 1)).contains("order"));
        assert!(change(&|record| record.errors_unlisted = u64::MAX).contains("more bad blocks"));
        assert!(change(&|record| record.errors[0].files = Some(Vec::new())).contains("files"));
        assert!(change(&|record| record.unchecked[0].last = 20).contains("unchecked"));
        assert!(change(&|record| record.lost_metadata.push("\u{1b}[2J".to_owned())).contains("control"));
    }

    #[test]
    fn what_is_kept_is_bounded_and_what_is_not_is_counted() {
        let mut record = begun();
        record.identity.blocks = 1 << 40;
        record.asked.last = (1 << 40) - 1;
        for number in 0..MAX_PARTS as u64 + 5 {
            let at = 10 + number * 100;
            let errors = (0..100).map(|lba| error(at + lba)).collect();
            let gaps = (0..2).map(|gap| run(at + gap * 50, at + gap * 50, "b")).collect();
            record.add(part(at, at + 99), Record { errors, unchecked: gaps, ..begun() });
        }
        assert_eq!((record.parts.len(), record.errors.len()), (MAX_PARTS, MAX_ERRORS));
        assert_eq!(record.errors_unlisted, (MAX_PARTS as u64 + 5) * 100 - MAX_ERRORS as u64);
        assert!(record.unchecked.len() <= MAX_UNCHECKED);
        assert_eq!(record.parts[0].bytes_transferred, 6 * 4096);
        let covered = |lba| record.unchecked.iter().any(|run| run.first <= lba && lba <= run.last);
        assert!((0..MAX_PARTS as u64 + 5).all(|number| covered(10 + number * 100) && covered(60 + number * 100)));
        assert_eq!(Record::decode(&written(&record)).unwrap(), record);
    }

    proptest! {
        #[test]
        fn no_bytes_are_a_reason_to_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), json in "[\\[\\]{}:,\"a-z0-9]{0,80}") {
            let _ = Record::decode(&bytes);
            prop_assert!(Record::decode(&Record::framed(json.as_bytes())).is_err());
        }

        #[test]
        fn a_flipped_bit_is_never_a_record(at in any::<prop::sample::Index>(), bit in 0..8u32) {
            let mut record = begun();
            record.add(part(10, 19), found());
            let mut bytes = written(&record);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(Record::decode(&bytes).is_err());
        }
    }
}
