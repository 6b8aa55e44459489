//! What stands behind the `?` of an NVMe/TCP target: how the connection is made and used.
//!
//! ```text
//! options = "?" option "&" option ...
//! option  = "hdgst" | "ddgst" | "pract=" ("0" | "1") | "queues=" 1..65535 | "depth=" 1..65535 | "hostnqn=" nqn
//!         | "timeout=" time | "keepalive=" time | "reconnect=" time | "attempts=" 1..65535
//! ```
//!
//! Each at most once, in any order. A time is a whole number and `ms`, `s`, `min` or `h`, up to 2^32 - 1 ms.

use std::fmt;
use std::num::NonZeroU16;
use std::time::Duration;

use super::error::TargetErrorKind;
use super::piece::{Fail, Piece, decode, digits, encode};
use crate::quantity::Time;

/// Longest NVMe Qualified Name, in bytes (NVM Express Base Specification, "NVMe Qualified Names").
const MAX_NQN_BYTES: usize = 223;

/// How a namespace over NVMe/TCP is used. Nothing said leaves it to the device.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct RemoteOptions {
    /// `hdgst`: PDU headers carry digests.
    pub header_digest: bool,
    /// `ddgst`: data carries digests.
    pub data_digest: bool,
    /// `pract`: whether the target makes and checks tags (1) or they travel with the data (0).
    pub target_makes_tags: Option<bool>,
    /// `queues`: connections for I/O.
    pub queues: Option<NonZeroU16>,
    /// `depth`: commands in flight on one of them.
    pub depth: Option<NonZeroU16>,
    /// `hostnqn`: the name of this host.
    pub host_nqn: Option<String>,
    /// `timeout`: how long an answer may take, and setting up a connection. Never zero.
    pub timeout: Option<Duration>,
    /// `keepalive`: how long the target waits for a sign of life of this host. Never zero.
    pub keep_alive: Option<Duration>,
    /// `reconnect`: for how long a lost connection is set up again; zero for not at all.
    pub reconnect: Option<Duration>,
    /// `attempts`: how often that is tried.
    pub attempts: Option<NonZeroU16>,
}

/// Whether the text may be the name of a subsystem or a host. Not every such text is one; who connects looks closer.
pub(super) fn is_nqn(text: &str) -> bool {
    text.len() <= MAX_NQN_BYTES && text.starts_with("nqn.") && !text.chars().any(char::is_control)
}

/// Reads what is behind the `?`.
pub(super) fn options(piece: Piece<'_>) -> Result<RemoteOptions, Fail> {
    let mut options = RemoteOptions::default();
    piece.split('&').try_for_each(|option| read(option, &mut options))?;
    Ok(options)
}

fn read(option: Piece<'_>, options: &mut RemoteOptions) -> Result<(), Fail> {
    let number = |value: &str| digits(value)?.parse::<NonZeroU16>().ok();
    // As long as the protocol's own timers count, in milliseconds.
    let time = |value: &str| {
        let time = value.parse::<Time>().ok().map(|time| time.0);
        time.filter(|time| time.as_millis() <= u128::from(u32::MAX))
    };
    let some_time = |value: &str| time(value).filter(|time| !time.is_zero());
    let is_new = match option.text.split_once('=') {
        None if option.text == "hdgst" => Some(!std::mem::replace(&mut options.header_digest, true)),
        None if option.text == "ddgst" => Some(!std::mem::replace(&mut options.data_digest, true)),
        Some(("pract", "0" | "1")) => set(&mut options.target_makes_tags, Some(option.text.ends_with('1'))),
        Some(("queues", value)) => set(&mut options.queues, number(value)),
        Some(("depth", value)) => set(&mut options.depth, number(value)),
        Some(("attempts", value)) => set(&mut options.attempts, number(value)),
        Some(("hostnqn", value)) => {
            let name = decode(Piece { text: value, at: option.at + "hostnqn=".len() })?;
            if !is_nqn(&name) {
                return option.fail(TargetErrorKind::Nqn(name));
            }
            set(&mut options.host_nqn, Some(name))
        }
        Some(("timeout", value)) => set(&mut options.timeout, some_time(value)),
        Some(("keepalive", value)) => set(&mut options.keep_alive, some_time(value)),
        Some(("reconnect", value)) => set(&mut options.reconnect, time(value)),
        _ => None,
    };
    match is_new {
        Some(true) => Ok(()),
        Some(false) => option.fail(TargetErrorKind::OptionTwice(option.text.to_owned())),
        None => option.fail(TargetErrorKind::Option(option.text.to_owned())),
    }
}

/// Sets an option. Returns true if it was not given before; `None` without a value.
fn set<T>(place: &mut Option<T>, value: Option<T>) -> Option<bool> {
    value.map(|value| place.replace(value).is_none())
}

impl fmt::Display for RemoteOptions {
    /// With a leading `?`; empty without options.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let options = [
            self.header_digest.then(|| "hdgst".to_owned()),
            self.data_digest.then(|| "ddgst".to_owned()),
            self.target_makes_tags.map(|makes| format!("pract={}", u8::from(makes))),
            self.queues.map(|queues| format!("queues={queues}")),
            self.depth.map(|depth| format!("depth={depth}")),
            self.host_nqn.as_ref().map(|nqn| format!("hostnqn={}", encode(nqn, ":"))),
            self.timeout.map(|time| format!("timeout={}", Time(time))),
            self.keep_alive.map(|time| format!("keepalive={}", Time(time))),
            self.reconnect.map(|time| format!("reconnect={}", Time(time))),
            self.attempts.map(|attempts| format!("attempts={attempts}")),
        ];
        let options: Vec<_> = options.into_iter().flatten().collect();
        if options.is_empty() { Ok(()) } else { write!(f, "?{}", options.join("&")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::{TargetError, TargetName};

    const AT: &str = "nvme+tcp://h/nqn.x/1?";

    fn parse(text: &str) -> Result<TargetName, TargetError> {
        format!("{AT}{text}").parse()
    }

    #[test]
    fn options_are_read_and_printed() {
        let Ok(TargetName::NvmeTcp { options, .. }) =
            parse("ddgst&hostnqn=nqn.a%3Fb&hdgst&pract=1&queues=4&depth=65535")
        else {
            panic!("another kind");
        };
        assert!(options.header_digest && options.data_digest);
        assert_eq!((options.target_makes_tags, options.queues), (Some(true), NonZeroU16::new(4)));
        assert_eq!((options.depth, options.host_nqn.as_deref()), (NonZeroU16::new(65535), Some("nqn.a?b")));
        assert_eq!(options.to_string(), "?hdgst&ddgst&pract=1&queues=4&depth=65535&hostnqn=nqn.a%3Fb");
        let again = parse(&options.to_string()[1..]).unwrap();
        assert_eq!(again.to_string(), format!("{}{options}", AT.trim_end_matches('?')));
    }

    #[test]
    fn times_are_read_and_printed() {
        let Ok(TargetName::NvmeTcp { options, .. }) = parse("reconnect=0s&timeout=1500ms&keepalive=60s&attempts=3")
        else {
            panic!("another kind");
        };
        let times = (options.timeout, options.keep_alive, options.reconnect);
        assert_eq!(times, (Some(Duration::from_millis(1500)), Some(Duration::from_secs(60)), Some(Duration::ZERO)));
        assert_eq!(options.to_string(), "?timeout=1500ms&keepalive=1min&reconnect=0ms&attempts=3");
        assert!(parse(&options.to_string()[1..]).is_ok());
    }

    #[test]
    fn the_hint_names_every_option() {
        let hint = TargetErrorKind::Option(String::new()).to_string();
        let hint = hint.split("try ").nth(1).unwrap().replace("hostnqn=NQN", "hostnqn=nqn.a").replace(" or ", " ");
        let named: Vec<&str> =
            hint.split(", with").next().unwrap().split([',', ' ']).filter(|word| !word.is_empty()).collect();
        for option in &named {
            assert!(parse(option).is_ok(), "{option}");
        }
        let Ok(TargetName::NvmeTcp { options, .. }) =
            parse("hdgst&ddgst&pract=1&queues=4&depth=5&hostnqn=nqn.a&timeout=1s&keepalive=1s&reconnect=1s&attempts=3")
        else {
            panic!("another kind");
        };
        let RemoteOptions {
            header_digest: true,
            data_digest: true,
            target_makes_tags: Some(_),
            queues: Some(_),
            depth: Some(_),
            host_nqn: Some(_),
            timeout: Some(_),
            keep_alive: Some(_),
            reconnect: Some(_),
            attempts: Some(_),
        } = &options
        else {
            panic!("an option is not given");
        };
        for option in options.to_string()[1..].split('&') {
            let name = option.split('=').next().unwrap();
            assert!(named.iter().any(|named| named.split('=').next() == Some(name)), "{name} is not in: {hint}");
        }
    }

    #[test]
    fn what_is_no_option_is_refused() {
        for (text, column, problem) in [
            ("", 22, TargetErrorKind::Option(String::new())),
            ("tls", 22, TargetErrorKind::Option("tls".to_owned())),
            ("hdgst&", 28, TargetErrorKind::Option(String::new())),
            ("hdgst=1", 22, TargetErrorKind::Option("hdgst=1".to_owned())),
            ("pract=2", 22, TargetErrorKind::Option("pract=2".to_owned())),
            ("queues=0", 22, TargetErrorKind::Option("queues=0".to_owned())),
            ("queues=+1", 22, TargetErrorKind::Option("queues=+1".to_owned())),
            ("timeout=0s", 22, TargetErrorKind::Option("timeout=0s".to_owned())),
            ("timeout=5", 22, TargetErrorKind::Option("timeout=5".to_owned())),
            ("keepalive=0ms", 22, TargetErrorKind::Option("keepalive=0ms".to_owned())),
            ("reconnect=50d", 22, TargetErrorKind::Option("reconnect=50d".to_owned())),
            ("reconnect=1200h", 22, TargetErrorKind::Option("reconnect=1200h".to_owned())),
            ("attempts=0", 22, TargetErrorKind::Option("attempts=0".to_owned())),
            ("timeout=1s&timeout=2s", 33, TargetErrorKind::OptionTwice("timeout=2s".to_owned())),
            ("depth=65536", 22, TargetErrorKind::Option("depth=65536".to_owned())),
            ("ddgst&ddgst", 28, TargetErrorKind::OptionTwice("ddgst".to_owned())),
            ("hostnqn=x", 22, TargetErrorKind::Nqn("x".to_owned())),
            ("hostnqn=nqn.%f", 34, TargetErrorKind::Percent),
        ] {
            assert_eq!(parse(text), Err(TargetError { column, problem }), "{text}");
        }
    }
}
