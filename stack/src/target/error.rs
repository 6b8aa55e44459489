//! What can be wrong with a target name, where, and what to try instead.

use sealblock_units::SizeError;

use crate::range::RangeError;

/// The longest text that is read, in bytes.
pub const MAX_TEXT_BYTES: usize = 64 << 10;
/// How deep groups, offsets and faults nest.
pub const MAX_DEPTH: usize = 16;
/// Max. members of a group.
pub const MAX_MEMBERS: usize = 64;

/// Why a text names no target.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("column {column}: {problem}")]
pub struct TargetError {
    /// Where, in characters, counted from 1.
    pub column: usize,
    /// What is wrong there.
    pub problem: TargetErrorKind,
}

/// What is wrong at one place of a target name, and what to try instead.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TargetErrorKind {
    /// The text is longer than [`MAX_TEXT_BYTES`].
    #[error("the name is longer than {MAX_TEXT_BYTES} bytes; try a shorter name")]
    TooLong,
    /// Groups, offsets and faults nest deeper than [`MAX_DEPTH`].
    #[error("targets are nested deeper than {MAX_DEPTH}; try a flatter arrangement")]
    TooDeep,
    /// Nothing stands where a target is needed.
    #[error("a target is missing here; try a path, such as disk.img, or mem:1GiB")]
    Missing,
    /// `-` where a target is needed.
    #[error("'-' is standard input or output, accepted only by copy; try ./- for a file of that name")]
    Standard,
    /// A word and a colon that name no kind of target.
    #[error(
        "'{0}' is not a kind of target; try file:NAME for a file with a colon in its name, or one of file:, raw:, mem:, null:, nvme+tcp://, nbd://, nbd+unix:///, \
         mirror:, stripe:, multipath:, offset: and fault:"
    )]
    Unknown(String),
    /// A URI without its slashes.
    #[error("'{0}' must be followed by two slashes; try {form}", form = form_of(.0))]
    Slashes(&'static str),
    /// A control character, such as the end of a line.
    #[error("a name must not have control characters, such as a line break; try a link to the file with another name")]
    Control,
    /// No path can hold a zero byte.
    #[error("a path must not have a zero byte; try a path without it")]
    ZeroByte,
    /// What should be a size is none.
    #[error("{0}; try 1GiB")]
    Size(#[from] SizeError),
    /// A device without a byte.
    #[error("the size must be more than 0; try 1GiB")]
    NoBytes,
    /// What should be a range of blocks is none.
    #[error("{0}; try offset:0..99,TARGET")]
    Range(#[from] RangeError),
    /// A URI without a host.
    #[error("the host is missing; try a name or an address after the slashes, such as localhost or [::1]")]
    NoHost,
    /// A host name with a character it cannot have, or longer than 253 bytes.
    #[error(
        "'{0}' is not a host name or address; try a name, an IPv4 address, or an IPv6 address in brackets such as [::1]"
    )]
    Host(String),
    /// A port that is none.
    #[error("'{0}' is not a port from 1 to 65535; try without a port, for the default one")]
    Port(String),
    /// `%` without two hexadecimal digits, or bytes that are no text.
    #[error("'%' must be followed by the two hexadecimal digits of a byte of UTF-8 text; try %25 for a percent sign")]
    Percent,
    /// A part of URIs that these do not have.
    #[error("unexpected '{0}'; try %{code:02X} if it is part of the name", code = u32::from(*.0))]
    UriPart(char),
    /// An option of an NVMe/TCP target that there is not.
    #[error(
        "'{0}' is no option of an NVMe/TCP target; try hdgst, ddgst, pract=0, pract=1, queues=4, depth=128, hostnqn=NQN, timeout=5s, \
         keepalive=5s, reconnect=0s or attempts=3, with & between them"
    )]
    Option(String),
    /// What is behind the `?` of an NBD name is no option.
    #[error("'{0}' is not an option of NBD targets; try connections=4")]
    NbdOption(String),
    /// What is behind the `?` of memory is no option.
    #[error("'{0}' is not an option of memory; try preallocate, or nothing after the size")]
    MemoryOption(String),
    /// An option of a drive is unknown, or has no value of its kind.
    #[error("'{0}' is not an option of drives; try pract=0 or pract=1, for NVMe drives")]
    DriveOption(String),
    /// An option that was given before.
    #[error("'{0}' is given twice; try each option once")]
    OptionTwice(String),
    /// No subsystem is named.
    #[error("the NQN of the subsystem is missing; try nvme+tcp://HOST/nqn.2026-01.org.example:disk")]
    NoNqn,
    /// A name that cannot be a subsystem's.
    #[error(
        "'{0}' is not an NQN: it must begin with 'nqn.' and have at most 223 bytes without control characters; try nvme+tcp://HOST/nqn.2026-01.org.example:disk"
    )]
    Nqn(String),
    /// A namespace identifier that is none.
    #[error("'{0}' is not a namespace identifier from 1 to 4294967294; try without a namespace if there is only one")]
    Nsid(String),
    /// An export name longer than NBD allows, or with a zero byte.
    #[error("the export's name has more than 4096 bytes or a zero byte; try the name that the server lists")]
    Export,
    /// A group of fewer than two.
    #[error("a {0} needs at least two targets; try {0}:A,B")]
    FewLegs(&'static str),
    /// A group of more than [`MAX_MEMBERS`].
    #[error("a {0} has more than {MAX_MEMBERS} targets; try groups of groups, such as {0}:[{0}:A,B],[{0}:C,D]")]
    ManyMembers(&'static str),
    /// A `[` that nothing closes.
    #[error("this '[' is not closed; try one ']' for each '['; a name with an unpaired bracket cannot be in a group")]
    Unclosed,
    /// A `]` that nothing opened.
    #[error("this ']' closes nothing; try one ']' for each '['; a name with an unpaired bracket cannot be in a group")]
    Unopened,
    /// Something follows the `]` of a target in brackets.
    #[error("a target in brackets ends with its ']'; try a comma, or file: in front of a path that begins with '['")]
    BehindBracket,
    /// Brackets straight inside of brackets.
    #[error(
        "these brackets are directly inside others; try one pair of brackets, or file: in front of a path that begins with '['"
    )]
    Doubled,
    /// An export where only its server is meant.
    #[error("give a server, without an export; try nbd+unix:///?socket=PATH")]
    ServerOnly,
    /// A Unix socket on a host.
    #[error("a Unix socket has no host: use three slashes before the export; try nbd+unix:///EXPORT?socket=PATH")]
    SocketHost,
    /// An NBD server without its socket.
    #[error("the path of the socket is missing; try nbd+unix:///EXPORT?socket=PATH")]
    NoSocket,
    /// An offset or a fault without a target.
    #[error("a comma and a target are missing; try {form}", form = form_of(.0))]
    NoInner(&'static str),
    /// A fault without rules in brackets.
    #[error("the rules of a fault must be in brackets here; try fault:[seed=7;read-error@100..200],TARGET")]
    NoRules,
}

/// What a kind of target looks like.
fn form_of(kind: &str) -> &'static str {
    match kind {
        "nbd:" => "nbd://HOST/EXPORT",
        "nbd+unix:" => "nbd+unix:///EXPORT?socket=PATH",
        "fault" => "fault:[RULES],TARGET",
        "offset" => "offset:FIRST..LAST,TARGET, in brackets in a group",
        _ => "nvme+tcp://HOST/nqn.2026-01.org.example:disk",
    }
}
