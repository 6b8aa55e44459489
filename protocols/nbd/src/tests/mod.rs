//! A server against bytes that are written out here.

mod client_negotiation;
mod client_replies;
mod long_writes;
mod negotiation;
mod noise;
mod pair;
mod transmission;

use crate::fuzz::{Transcript, play, server};
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
