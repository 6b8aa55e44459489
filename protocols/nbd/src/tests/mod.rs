//! A server against bytes that are written out here, and against noise in any pieces.

mod client_negotiation;
mod client_replies;
mod long_writes;
mod negotiation;
mod pair;
mod transmission;

use proptest::prelude::*;
use proptest::sample::Index;

use crate::fuzz::{self, Transcript, play, preamble, server};
use crate::wire;

/// Big-endian fields one after the other.
macro_rules! fields {
    ($($value:expr),* $(,)?) => { [$($value.to_be_bytes().to_vec()),*].concat() };
}
pub(crate) use fields;

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    [fields![wire::OPTION_MAGIC, option, data.len() as u32], data.to_vec()].concat()
}

/// What the server says to these bytes after its greeting, and how it ends.
fn say(bytes: &[u8]) -> Transcript {
    let mut transcript = play(&mut server(8192), [bytes]);
    let greeting = transcript.sent.drain(..18).collect::<Vec<u8>>();
    assert_eq!(greeting, b"NBDMAGICIHAVEOPT\0\x03");
    transcript
}

/// Replies to options: option, type, data.
fn replies(mut bytes: &[u8]) -> Vec<(u32, u32, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some((head, rest)) = bytes.split_at_checked(20) {
        let word = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
        assert_eq!(head[..8], 0x0003_e889_0455_65a9u64.to_be_bytes());
        let (data, rest) = rest.split_at(word(16) as usize);
        all.push((word(8), word(12), data.to_vec()));
        bytes = rest;
    }
    assert!(bytes.is_empty());
    all
}

/// Requests that are nearly right, which lead deeper than noise.
fn request(style: u8) -> impl Strategy<Value = Vec<u8>> {
    let number = prop_oneof![Just(0u64), Just(512), Just(1536), Just(4096), Just(8192), Just(1 << 40), any::<u64>()];
    let flags = prop_oneof![4 => Just(0u16), 1 => 0..64u16, 3 => Just(wire::flag::PAYLOAD_LEN)];
    (flags, 0..9u16, any::<u64>(), number.clone(), number).prop_map(move |(flags, kind, cookie, offset, length)| {
        let extended = style % 3 == 2;
        let magic = if extended { wire::EXTENDED_REQUEST_MAGIC } else { wire::REQUEST_MAGIC };
        let mut bytes = fields![magic, flags, kind, cookie, offset];
        let brings = kind == wire::command::WRITE || (extended && flags & wire::flag::PAYLOAD_LEN != 0);
        match extended {
            true => bytes.extend(length.to_be_bytes()),
            false => bytes.extend((length as u32).to_be_bytes()),
        }
        if brings && length <= 8192 {
            bytes.extend((0..length).map(|i| i as u8));
        }
        bytes
    })
}

fn session() -> impl Strategy<Value = Vec<u8>> {
    let requests = |style: u8| proptest::collection::vec(request(style), 0..12).prop_map(move |all| (style, all));
    (0..3u8).prop_flat_map(requests).prop_map(|(style, all)| [preamble(style), all.concat()].concat())
}

fn cut(bytes: &[u8], cuts: &[Index]) -> Vec<Vec<u8>> {
    let mut ends: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).chain([bytes.len()]).collect();
    ends.sort_unstable();
    let mut from = 0;
    ends.into_iter().map(|end| bytes[std::mem::replace(&mut from, end)..end].to_vec()).collect()
}

proptest! {
    #[test]
    fn noise_does_no_harm(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        fuzz::run(&bytes);
    }

    #[test]
    fn cuts_make_no_difference(bytes in session(), cuts in proptest::collection::vec(any::<Index>(), 0..24)) {
        let whole = play(&mut server(usize::MAX), [&bytes[..]]);
        let pieces = cut(&bytes, &cuts);
        for direct_bytes in [1, 1000] {
            let cut = play(&mut server(direct_bytes), pieces.iter().map(|piece| &piece[..]));
            prop_assert_eq!(&cut, &whole);
        }
    }

    #[test]
    fn changed_bytes_do_no_harm(
        bytes in session(),
        changes in proptest::collection::vec((any::<Index>(), any::<u8>()), 1..6),
        piece in 1..300usize,
    ) {
        let mut bytes = bytes;
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let whole = play(&mut server(1), [&bytes[..]]);
        prop_assert_eq!(&play(&mut server(1), bytes.chunks(piece)), &whole);
    }
}
