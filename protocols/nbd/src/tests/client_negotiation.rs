//! A client's negotiation against bytes that are written out here.

use super::*;
use crate::SessionName;
use crate::client::{BlockSizes, Closed, ExportInfo, Goal, NegotiationError, ReplyStyle, Violation};
use crate::fuzz::client::{Transcript, client, greeting, option_reply, play, preamble};
use crate::wire::{option as o, rep};

fn go() -> Goal {
    Goal::Go("disk".into())
}

fn receive_all(goal: Goal, bytes: &[u8]) -> Transcript {
    play(&mut client(goal, 8192), [bytes])
}

/// How a client for an export ends after the greeting and these replies.
fn ends(replies: &[Vec<u8>]) -> Option<Closed> {
    receive_all(go(), &[greeting(), replies.concat()].concat()).closed
}

fn described(style: u8, replies: &[Vec<u8>]) -> ExportInfo {
    let mut core = client(go(), 8192);
    let whole = preamble(style);
    // All but the acknowledgement of GO.
    let start = &whole[..whole.len() - 20];
    play(&mut core, [start, &replies.concat(), &option_reply(o::GO, rep::ACK, &[])]);
    core.export().cloned().expect("the export is taken")
}

#[test]
fn the_words_of_a_client_are_those_of_the_protocol() {
    let transcript = receive_all(go(), &preamble(1));
    let name = [fields![4u32], b"disk".to_vec()].concat();
    let contexts = ["base:allocation", "x-sealblock:older", "x-sealblock:identity"];
    let contexts = contexts.map(|context| [fields![context.len() as u32], context.into()].concat());
    let context = [name.clone(), fields![3u32], contexts.concat()].concat();
    let wanted = [name, fields![3u16, 1u16, 2u16, 3u16]].concat();
    let said = [
        fields![3u32],
        option(o::EXTENDED_HEADERS, &[]),
        option(o::STRUCTURED_REPLY, &[]),
        option(o::SET_META_CONTEXT, &context),
        option(o::GO, &wanted),
    ];
    let said = said.concat();
    assert_eq!(transcript.sent[..said.len()], said);
    // A read of 4096 bytes at 4096 follows: magic, no flags, type, cookie, offset, length.
    assert_eq!(transcript.sent[said.len()..][..28], fields![0x2560_9513u32, 0u16, 0u16, 1u64 << 32, 4096u64, 4096u32]);
}

#[test]
fn extended_headers_are_asked_for_first_and_used() {
    let transcript = receive_all(go(), &preamble(2));
    let read = fields![0x21e4_1c71u32, 0u16, 0u16, 1u64 << 32, 4096u64, 4096u64];
    assert!(transcript.sent.windows(read.len()).any(|window| window == read));
    // A write brings its data by the flag PAYLOAD_LEN, and is FUA here.
    let write = fields![0x21e4_1c71u32, 0x21u16, 1u16, 3u64 << 32 | 2, 4096u64, 512u64];
    assert!(transcript.sent.windows(write.len()).any(|window| window == write));
    assert_eq!(described(2, &[]).style, ReplyStyle::Extended);
}

#[test]
fn what_is_no_server_of_this_protocol_is_refused() {
    let flags = |flags: u16| [b"NBDMAGICIHAVEOPT".to_vec(), fields![flags]].concat();
    assert_eq!(receive_all(go(), &flags(3)).closed, None);
    assert_eq!(receive_all(go(), &flags(2)).closed, Some(NegotiationError::NotFixed.into()));
    let http = u64::from_be_bytes(*b"HTTP/1.1");
    assert_eq!(receive_all(go(), b"HTTP/1.1 400 Bad").closed, Some(Violation::Greeting(http).into()));
    let old = [b"NBDMAGIC".to_vec(), fields![0x0000_4202_8186_1253u64]].concat();
    assert_eq!(receive_all(go(), &old).closed, Some(NegotiationError::Oldstyle.into()));
    let odd = [b"NBDMAGIC".to_vec(), fields![7u64]].concat();
    assert_eq!(receive_all(go(), &odd).closed, Some(Violation::Style(7).into()));
}

#[test]
fn flags_that_were_not_offered_are_not_used() {
    let transcript = receive_all(go(), &[b"NBDMAGICIHAVEOPT".to_vec(), fields![0x8001u16]].concat());
    assert_eq!(transcript.sent[..4], fields![1u32], "without NO_ZEROES, and without what is not known");
}

#[test]
fn a_server_that_demands_tls_is_refused_at_once() {
    let transcript =
        receive_all(go(), &[greeting(), option_reply(o::EXTENDED_HEADERS, rep::ERR_TLS_REQD, b"use TLS")].concat());
    assert_eq!(transcript.closed, Some(NegotiationError::TlsRequired.into()));
    let list = [greeting(), option_reply(o::LIST, rep::ERR_TLS_REQD, &[])].concat();
    assert_eq!(receive_all(Goal::List, &list).closed, Some(NegotiationError::TlsRequired.into()));
}

#[test]
fn an_export_that_is_not_there_is_refused_in_the_servers_words() {
    let mut bytes = preamble(1);
    bytes.truncate(bytes.len() - 20 - 32);
    bytes.extend(option_reply(o::GO, rep::ERR_UNKNOWN, b"no \x1bdisk here"));
    let Some(Closed::Refused(refused @ NegotiationError::Unknown(_))) = receive_all(go(), &bytes).closed else {
        panic!("not refused")
    };
    assert_eq!(refused.to_string(), "the server has no such export: no disk here");
}

#[test]
fn exports_are_listed_and_the_negotiation_is_given_up() {
    let entry = |name: &str, text: &str| [fields![name.len() as u32], name.into(), text.into()].concat();
    let replies = [
        greeting(),
        option_reply(o::LIST, rep::SERVER, &entry("a", "one")),
        option_reply(o::LIST, rep::SERVER, &entry("", "")),
        option_reply(o::LIST, rep::ACK, &[]),
    ];
    let transcript = receive_all(Goal::List, &replies.concat());
    assert_eq!(
        transcript.events[0],
        r#"Listed([ListedExport { name: "a", description: "one" }, ListedExport { name: "", description: "" }])"#
    );
    assert_eq!(transcript.sent, [fields![3u32], option(o::LIST, &[]), option(o::ABORT, &[])].concat());
    assert_eq!(transcript.closed, Some(Closed::Ended));
    let short = option_reply(o::LIST, rep::SERVER, &fields![2u32, 0u8]);
    let closed = receive_all(Goal::List, &[greeting(), short].concat()).closed;
    assert_eq!(closed, Some(Violation::OptionData { option: o::LIST, length: 5 }.into()));
}

#[test]
fn info_describes_without_transmission() {
    let mut bytes = preamble(1);
    bytes.truncate(bytes.len() - 20 - 32);
    bytes.extend(option_reply(o::INFO, rep::INFO, &fields![0u16, 4096u64, 1u16]));
    bytes.extend(option_reply(o::INFO, rep::ACK, &[]));
    let transcript = receive_all(Goal::Info("disk".into()), &bytes);
    assert!(transcript.events[0].starts_with("Described("), "{:?}", transcript.events);
    assert_eq!(transcript.closed, Some(Closed::Ended));
    assert!(transcript.sent.ends_with(&option(o::ABORT, &[])));
}

#[test]
fn block_sizes_are_taken_and_impossible_ones_are_not() {
    let sizes = |a: u32, b: u32, c: u32| option_reply(o::GO, rep::INFO, &fields![3u16, a, b, c]);
    assert_eq!(described(1, &[]).sizes, BlockSizes { smallest: 1, best: 4096, largest: 32 << 20 });
    let told = BlockSizes { smallest: 512, best: 4096, largest: 1 << 20 };
    assert_eq!(described(1, &[sizes(512, 4096, 1 << 20)]).sizes, told);
    assert_eq!(described(1, &[sizes(512, 4096, u32::MAX)]).sizes.largest, u32::MAX);
    for (a, b, c) in [(0, 4096, 4096), (3, 4096, 4096), (512, 256, 4096), (512, 4096, 256), (512, 4096, 5000)] {
        let mut bytes = preamble(1);
        bytes.truncate(bytes.len() - 20);
        bytes.extend(sizes(a, b, c));
        assert_eq!(receive_all(go(), &bytes).closed, Some(Violation::BlockSizes(a, b, c).into()));
    }
}

#[test]
fn replies_out_of_place_end_it() {
    let wrong_magic = [fields![7u64], vec![0; 12]].concat();
    assert_eq!(ends(&[wrong_magic]), Some(Violation::OptionMagic(7).into()));
    let other = Violation::OptionAnswered { expected: o::EXTENDED_HEADERS, actual: o::LIST };
    assert_eq!(ends(&[option_reply(o::LIST, rep::ACK, &[])]), Some(other.into()));
    let kind = Violation::OptionReply { option: o::EXTENDED_HEADERS, kind: rep::SERVER };
    assert_eq!(ends(&[option_reply(o::EXTENDED_HEADERS, rep::SERVER, &[])]), Some(kind.into()));
    let data = Violation::OptionData { option: o::EXTENDED_HEADERS, length: 1 };
    assert_eq!(ends(&[option_reply(o::EXTENDED_HEADERS, rep::ACK, b"x")]), Some(data.into()));
    let mut no_size = preamble(1);
    no_size.truncate(no_size.len() - 20 - 32);
    no_size.extend(option_reply(o::GO, rep::ACK, &[]));
    assert_eq!(receive_all(go(), &no_size).closed, Some(Violation::NoSize.into()));
}

#[test]
fn contexts_that_were_not_asked_for_end_it() {
    let answer = |name: &[u8]| option_reply(o::SET_META_CONTEXT, rep::META_CONTEXT, &[&fields![1u32], name].concat());
    let ack = option_reply(o::EXTENDED_HEADERS, rep::ACK, &[]);
    assert_eq!(ends(&[ack.clone(), answer(b"base:allocation")]), None);
    for bad in [vec![answer(b"qemu:dirty")], vec![answer(b"base:allocation"), answer(b"base:allocation")]] {
        let closed = ends(&[ack.clone(), bad.concat()]);
        assert!(matches!(closed, Some(Closed::Violation(Violation::OptionData { .. }))), "{closed:?}");
    }
}

#[test]
fn a_session_is_fenced_only_by_a_server_that_lists_its_name() {
    let session = SessionName { client: [7; 16], number: 3 };
    let fenced = |names: &[&str]| {
        let mut core = client(go(), 8192);
        core.config.session = Some(session);
        let listed: Vec<u8> = (1_u32..)
            .zip(names)
            .flat_map(|(id, name)| {
                option_reply(o::SET_META_CONTEXT, rep::META_CONTEXT, &[&fields![id], name.as_bytes()].concat())
            })
            .collect();
        let start = [greeting(), option_reply(o::EXTENDED_HEADERS, rep::ACK, &[])].concat();
        let go = [
            option_reply(o::SET_META_CONTEXT, rep::ACK, &[]),
            option_reply(o::GO, rep::INFO, &fields![0u16, 1u64 << 20, 1u16]),
            option_reply(o::GO, rep::ACK, &[]),
        ];
        let transcript = play(&mut core, [&start[..], &listed, &go.concat()]);
        (core.export().map(|export| export.is_fenced), transcript)
    };
    let (own, other) = (session.to_string(), SessionName { number: 4, ..session }.to_string());
    let (is_fenced, transcript) = fenced(&["base:allocation", &own]);
    assert_eq!(is_fenced, Some(true));
    assert!(transcript.sent.windows(own.len()).any(|window| window == own.as_bytes()));
    assert_eq!((fenced(&["base:allocation"]).0, fenced(&[&own]).0), (Some(false), Some(true)));
    for unasked in [vec![&other[..]], vec![&own[..], &own[..]]] {
        assert!(
            matches!(fenced(&unasked).1.closed, Some(Closed::Violation(Violation::OptionData { .. }))),
            "{unasked:?}"
        );
    }
}

#[test]
fn a_server_tells_once_whether_blocks_may_be_older() {
    let told = |names: &[&str]| {
        let context = |name: &&str| {
            option_reply(o::SET_META_CONTEXT, rep::META_CONTEXT, &[&fields![3u32], name.as_bytes()].concat())
        };
        let mut core = client(go(), 8192);
        let bytes = [
            greeting(),
            option_reply(o::EXTENDED_HEADERS, rep::ACK, &[]),
            names.iter().flat_map(context).collect(),
            option_reply(o::SET_META_CONTEXT, rep::ACK, &[]),
            option_reply(o::GO, rep::INFO, &fields![0u16, 1u64 << 20, 1u16]),
            option_reply(o::GO, rep::ACK, &[]),
        ];
        play(&mut core, [&bytes.concat()[..]]);
        core.export().map(|export| export.older)
    };
    assert_eq!(
        (told(&[]), told(&["x-sealblock:older=00"]), told(&["x-sealblock:older=85"])),
        (Some(0), Some(0), Some(0x85))
    );
    for bad in [
        "x-sealblock:older",
        "x-sealblock:older=",
        "x-sealblock:older=1",
        "x-sealblock:older=+1",
        "x-sealblock:older=0A1",
    ] {
        assert_eq!(told(&[bad]), None, "{bad}");
    }
    assert_eq!(told(&["x-sealblock:older=01", "x-sealblock:older=00"]), None, "it contradicts itself");
}

#[test]
fn a_server_that_talks_on_and_on_is_left() {
    let entry = option_reply(o::LIST, rep::SERVER, &fields![1u32, b'x']);
    let list = |count: usize| receive_all(Goal::List, &[greeting(), entry.repeat(count)].concat()).closed;
    assert_eq!((list(8), list(9)), (None, Some(Violation::OptionReplies(8).into())));
    let long = option_reply(o::LIST, rep::SERVER, &[fields![1u32], vec![b'x'; 1500]].concat());
    let closed = receive_all(Goal::List, &[greeting(), long.repeat(3)].concat()).closed;
    assert_eq!(closed, Some(Violation::NegotiationBytes(4096).into()));
}
