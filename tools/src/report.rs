//! What `verify --json` prints. `docs/formats/json.md` is the contract; these structures follow it.
//!
//! Guards and tags have up to 64 bits and more, and many readers of JSON keep only 53 of a number. They are texts of hexadecimal
//! digits, as wide as the field is.

use std::fmt;
use std::io::{self, Write};

use serde::{Serialize, Serializer};

use crate::exit::Failure;

/// The answer of `verify`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct VerifyReport {
    /// The target as its canonical name.
    pub target: String,
    /// Blocks that were looked at, bad ones included.
    pub blocks_verified: u64,
    /// Bytes of data in these blocks.
    pub bytes_verified: u64,
    /// Bytes of payload that crossed from the device to this host.
    pub bytes_transferred: u64,
    /// Whether the device did the checking.
    pub offloaded: bool,
    /// How long it took, in seconds.
    pub elapsed_s: f64,
    /// What is wrong, in the order of the blocks; empty when nothing is.
    pub errors: Vec<BlockError>,
}

/// One thing that is wrong with one block.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct BlockError {
    /// The address of the block.
    pub lba: u64,
    /// What does not fit.
    pub field: Field,
    /// What the field should be; nothing for [`Field::Media`].
    pub expected: Option<Hex>,
    /// What the field is; nothing for [`Field::Media`].
    pub actual: Option<Hex>,
    /// The target that is the bad leg of a group, where it was one.
    pub leg: Option<String>,
    /// Whether the block was rewritten from another copy.
    pub repaired: bool,
}

/// What does not fit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Field {
    /// The checksum of the data.
    Guard,
    /// The application tag.
    AppTag,
    /// The reference tag.
    RefTag,
    /// The storage tag.
    StorageTag,
    /// The block could not be read at all.
    Media,
    /// Copies of the block differ, and nothing tells which one is right.
    Conflict,
    /// Only an older copy is kept here, and every newer one is lost.
    Stale,
}

impl Field {
    /// The field as people read it.
    pub const fn words(self) -> &'static str {
        match self {
            Field::Guard => "guard",
            Field::AppTag => "application tag",
            Field::RefTag => "reference tag",
            Field::StorageTag => "storage tag",
            Field::Media => "medium",
            Field::Conflict => "conflict",
            Field::Stale => "stale",
        }
    }
}

/// The value of a guard or a tag.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Hex {
    value: u128,
    bits: u32,
}

impl Hex {
    /// A field of this many bits. Bits of `value` above them are shown too: a value that is too large is itself a finding.
    pub const fn new(value: u128, bits: u32) -> Hex {
        Hex { value, bits }
    }
}

impl fmt::Display for Hex {
    /// `0x` and lower-case digits, as many as the field is wide.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:0digits$x}", self.value, digits = self.bits.div_ceil(4) as usize)
    }
}

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Prints one JSON object and the end of its line on standard output. Fails when nobody reads it.
pub fn print_json(report: &impl Serialize) -> Result<(), Failure> {
    write_json(report, &mut io::stdout().lock()).map_err(|error| Failure::io("printing the report", &error))
}

fn write_json(report: &impl Serialize, output: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *output, report).map_err(io::Error::from)?;
    writeln!(output)?;
    output.flush()
}

/// Prints a line on standard output. Fails when nobody reads it.
pub fn say(line: &str) -> Result<(), Failure> {
    let mut output = io::stdout().lock();
    writeln!(output, "{line}").and_then(|()| output.flush()).map_err(|error| Failure::io("printing", &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(report: &impl Serialize) -> String {
        let mut text = Vec::new();
        write_json(report, &mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    fn error(field: Field, values: Option<(Hex, Hex)>) -> BlockError {
        let (expected, actual) = values.unzip();
        BlockError { lba: 7, field, expected, actual, leg: None, repaired: false }
    }

    #[test]
    fn a_report_is_printed_as_it_is_documented() {
        let guards = (Hex::new(0x1d0f, 32), Hex::new(u128::from(u32::MAX), 32));
        let media = BlockError { leg: Some("b".to_owned()), repaired: true, ..error(Field::Media, None) };
        let report = VerifyReport {
            target: "mirror:a,b".to_owned(),
            blocks_verified: 16,
            bytes_verified: 65536,
            bytes_transferred: 0,
            offloaded: true,
            elapsed_s: 0.25,
            errors: vec![error(Field::Guard, Some(guards)), media],
        };
        assert_eq!(
            printed(&report),
            concat!(
                r#"{"target":"mirror:a,b","blocks_verified":16,"bytes_verified":65536,"bytes_transferred":0,"#,
                r#""offloaded":true,"elapsed_s":0.25,"errors":["#,
                r#"{"lba":7,"field":"guard","expected":"0x00001d0f","actual":"0xffffffff","leg":null,"repaired":false},"#,
                r#"{"lba":7,"field":"media","expected":null,"actual":null,"leg":"b","repaired":true}]}"#,
                "\n"
            )
        );
    }

    #[test]
    fn fields_have_the_documented_names() {
        let names = [
            Field::Guard,
            Field::AppTag,
            Field::RefTag,
            Field::StorageTag,
            Field::Media,
            Field::Conflict,
            Field::Stale,
        ]
        .map(|field| printed(&field));
        assert_eq!(
            names.concat(),
            "\"guard\"\n\"app_tag\"\n\"ref_tag\"\n\"storage_tag\"\n\"media\"\n\"conflict\"\n\"stale\"\n"
        );
    }

    #[test]
    fn values_are_as_wide_as_their_field() {
        assert_eq!(Hex::new(0xab, 16).to_string(), "0x00ab");
        assert_eq!(Hex::new(u128::from(u64::MAX), 64).to_string(), "0xffffffffffffffff");
        assert_eq!(Hex::new(1, 80).to_string(), "0x00000000000000000001");
        assert_eq!(Hex::new(1, 7).to_string(), "0x01");
        assert_eq!(Hex::new(0x12345, 16).to_string(), "0x12345");
    }

    #[test]
    fn a_reader_that_went_away_is_an_error_and_no_panic() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let error = write_json(&1, &mut Closed).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
