//! Client flags and options.

use super::*;
use crate::wire::{option as o, rep};
use crate::{Closed, SessionName, Violation};

const FIXED: [u8; 4] = [0, 0, 0, 3];

/// The replies to options sent one after the other.
fn ask(options: &[(u32, &[u8])]) -> Vec<(u32, u32, Vec<u8>)> {
    let bytes: Vec<u8> = options.iter().flat_map(|(kind, data)| option(*kind, data)).collect();
    let transcript = say(&[&FIXED[..], &bytes].concat());
    assert_eq!(transcript.closed, None);
    replies(&transcript.sent)
}

/// Types of the final replies.
fn types(options: &[(u32, &[u8])]) -> Vec<u32> {
    let is_final = |kind: &u32| *kind == rep::ACK || kind >> 31 == 1;
    ask(options).into_iter().map(|reply| reply.1).filter(is_final).collect()
}

fn ends(bytes: &[u8]) -> Option<Closed> {
    say(bytes).closed
}

fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = [fields![name.len() as u32], name.as_bytes().to_vec(), fields![wanted.len() as u16]].concat();
    data.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

fn set(name: &str) -> Vec<u8> {
    let head = [fields![name.len() as u32], name.as_bytes().to_vec()].concat();
    [head, fields![1u32, 15u32], b"base:allocation".to_vec()].concat()
}

#[test]
fn client_flags_that_were_not_offered_end_it() {
    assert_eq!(ends(&FIXED), None);
    assert_eq!(ends(&[0, 0, 0, 7]), Some(Violation::ClientFlags(7).into()));
    assert_eq!(ends(&[1, 0, 0, 3]), Some(Violation::ClientFlags(0x0100_0003).into()));
}

#[test]
fn export_name_gives_size_and_flags_and_zeroes_unless_turned_down() {
    let sent = |flags: u8| say(&[&[0, 0, 0, flags][..], &option(o::EXPORT_NAME, b"fixed")].concat()).sent;
    let bare = sent(3);
    assert_eq!(bare.len(), 10);
    assert_eq!(bare[..8], (1u64 << 40).to_be_bytes());
    // Flags: has flags, read-only, flush, FUA, several connections, cache.
    assert_eq!(bare[8..], 0x050fu16.to_be_bytes());
    let padded = sent(0);
    assert_eq!((padded.len(), &padded[..10]), (134, &bare[..]));
    assert!(padded[10..].iter().all(|byte| *byte == 0));
}

#[test]
fn export_name_has_no_answer_for_errors() {
    let unknown = Some(Violation::UnknownExport.into());
    assert_eq!(ends(&[&FIXED[..], &option(o::EXPORT_NAME, b"nothing")].concat()), unknown);
    assert_eq!(ends(&[&FIXED[..], &option(o::EXPORT_NAME, &[b'x'; 600])].concat()), unknown, "longer than an option");
    let extended = [&FIXED[..], &option(o::EXTENDED_HEADERS, &[]), &option(o::EXPORT_NAME, b"disk")].concat();
    assert_eq!(ends(&extended), Some(Violation::Misplaced(o::EXPORT_NAME).into()));
}

#[test]
fn without_fixed_newstyle_there_is_only_export_name() {
    assert_eq!(ends(&[&[0; 4][..], &option(o::LIST, &[])].concat()), Some(Violation::Misplaced(o::LIST).into()));
    assert_eq!(ends(&[&[0; 4][..], &option(o::EXPORT_NAME, &[])].concat()), None, "the empty name is the first export");
}

#[test]
fn list_names_the_exports() {
    let all = ask(&[(o::LIST, &[])]);
    let server = |name: &str| [fields![name.len() as u32], name.as_bytes().to_vec(), b"for tests".to_vec()].concat();
    let entry = |name| (o::LIST, rep::SERVER, server(name));
    assert_eq!(all, [entry("disk"), entry("fixed"), (o::LIST, rep::ACK, vec![])]);
    assert_eq!(types(&[(o::LIST, b"x")]), [rep::ERR_INVALID]);
}

#[test]
fn info_describes_and_go_begins() {
    let about = go("disk", &[1, 2, 3, 77]);
    let all = ask(&[(o::STRUCTURED_REPLY, &[]), (o::INFO, &about)]);
    let info = |data: Vec<u8>| (o::INFO, rep::INFO, data);
    // Flags: has flags, flush, FUA, trim, zeroes, DF, several connections, cache, fast zeroes.
    let expected = [
        (o::STRUCTURED_REPLY, rep::ACK, vec![]),
        info([&[0, 1][..], b"disk"].concat()),
        info([&[0, 2][..], b"for tests"].concat()),
        info(fields![3u16, 512u32, 4096u32, 8192u32]),
        info(fields![0u16, 1u64 << 40, 0x0dedu16]),
        (o::INFO, rep::ACK, vec![]),
    ];
    assert_eq!(all, expected);
    let transcript = say(&[&FIXED[..], &option(o::GO, &go("fixed", &[]))].concat());
    assert_eq!(transcript.events, ["Chosen(1)"]);
}

#[test]
fn malformed_and_unknown_names_are_told_apart() {
    let good = go("disk", &[3]);
    assert_eq!(types(&[(o::INFO, &go("nothing", &[3]))]), [rep::ERR_UNKNOWN]);
    for len in 0..good.len() {
        assert_eq!(types(&[(o::INFO, &good[..len]), (o::INFO, &good)]), [rep::ERR_INVALID, rep::ACK], "{len} bytes");
    }
    assert_eq!(types(&[(o::INFO, &[&good[..], &[0]].concat())]), [rep::ERR_INVALID]);
}

#[test]
fn options_that_are_unknown_refused_or_out_of_order_get_their_error() {
    assert_eq!(types(&[(4, &[]), (99, b"data")]), [rep::ERR_UNSUP, rep::ERR_UNSUP]);
    assert_eq!(types(&[(o::STARTTLS, &[]), (o::STARTTLS, b"x")]), [rep::ERR_UNSUP, rep::ERR_INVALID]);
    assert_eq!(types(&[(o::STRUCTURED_REPLY, b"x"), (o::EXTENDED_HEADERS, b"x")]), [rep::ERR_INVALID; 2]);
    let downgrade = types(&[(o::EXTENDED_HEADERS, &[]), (o::STRUCTURED_REPLY, &[])]);
    assert_eq!(downgrade, [rep::ACK, rep::ERR_EXT_HEADER_REQD]);
}

#[test]
fn a_named_session_is_listed_and_holds_for_its_export() {
    let session = SessionName { client: [7; 16], number: 3 };
    let query = |export: &str, names: &[&str]| {
        let names: Vec<u8> =
            names.iter().flat_map(|name| [fields![name.len() as u32], name.as_bytes().to_vec()].concat()).collect();
        [fields![export.len() as u32], export.as_bytes().to_vec(), fields![2u32], names].concat()
    };
    let both = query("disk", &["base:allocation", &session.to_string()]);
    let sent = ask(&[(o::STRUCTURED_REPLY, &[]), (o::SET_META_CONTEXT, &both)]);
    let listed: Vec<_> =
        sent.iter().filter(|reply| reply.1 == rep::META_CONTEXT).map(|reply| reply.2.clone()).collect();
    let named = [fields![2u32], session.to_string().into_bytes()].concat();
    assert_eq!(listed, [[fields![1u32], b"base:allocation".to_vec()].concat(), named]);
    let chosen = |set: &str, taken: &str, fences: bool| {
        let bytes = [
            &FIXED[..],
            &option(o::STRUCTURED_REPLY, &[]),
            &option(o::SET_META_CONTEXT, &query(set, &["base:allocation", &session.to_string()])),
            &option(o::GO, &go(taken, &[])),
        ];
        let mut server = server(8192);
        server.config.fences_sessions = fences;
        play(&mut server, [&bytes.concat()[..]]);
        server.client_session()
    };
    assert_eq!((chosen("disk", "disk", true), chosen("fixed", "disk", true)), (Some(session), None));
    assert_eq!(chosen("disk", "disk", false), None, "a server that fences nothing does not know it");
    assert!(ask(&[(o::STRUCTURED_REPLY, &[]), (o::LIST_META_CONTEXT, &both)]).iter().all(|reply| reply.2.len() < 30));
}

#[test]
fn whether_blocks_may_be_older_is_told_to_who_asks() {
    let told = |export: &str, name: &str| {
        let query =
            [fields![export.len() as u32], export.as_bytes().to_vec(), fields![1u32, name.len() as u32], name.into()]
                .concat();
        let sent = ask(&[(o::STRUCTURED_REPLY, &[]), (o::SET_META_CONTEXT, &query)]);
        let mut listed = sent.into_iter().filter(|reply| reply.1 == rep::META_CONTEXT).map(|reply| reply.2);
        (listed.next(), listed.count())
    };
    let answer = |text: &str| (Some([fields![3u32], text.as_bytes().to_vec()].concat()), 0);
    assert_eq!(told("disk", "x-sealblock:older"), answer("x-sealblock:older=00"));
    assert_eq!(told("fixed", "x-sealblock:older"), answer("x-sealblock:older=03"));
    for other in ["x-sealblock:older=00", "x-sealblock:olde", "x-sealblock:"] {
        assert_eq!(told("disk", other), (None, 0), "{other}");
    }
}

#[test]
fn what_an_export_is_is_told_to_who_asks() {
    let query = [fields![4u32], b"disk".to_vec(), fields![1u32, 20u32], b"x-sealblock:identity".to_vec()].concat();
    let told = |option: u32| {
        let sent = ask(&[(o::STRUCTURED_REPLY, &[]), (option, &query)]);
        let contexts = sent.into_iter().filter(|reply| reply.1 == rep::META_CONTEXT);
        contexts.map(|reply| (reply.2[3], String::from_utf8(reply.2[4..].to_vec()).unwrap())).collect::<Vec<_>>()
    };
    let named = |id, what: &str, digit: &str| (id, format!("x-sealblock:{what}={}", digit.repeat(16)));
    let all = [named(4, "uuid", "06"), named(5, "device", "07"), named(5, "device", "08")];
    assert_eq!(told(o::SET_META_CONTEXT), all);
    assert_eq!(told(o::LIST_META_CONTEXT), []);
}

#[test]
fn contexts_want_chunks_first() {
    assert_eq!(types(&[(o::SET_META_CONTEXT, &set("disk"))]), [rep::ERR_INVALID]);
    for style in [o::STRUCTURED_REPLY, o::EXTENDED_HEADERS] {
        let all = ask(&[(style, &[]), (o::LIST_META_CONTEXT, &set("disk")), (o::SET_META_CONTEXT, &set("disk"))]);
        let named = |id: u32| [fields![id], b"base:allocation".to_vec()].concat();
        assert_eq!(all[1], (o::LIST_META_CONTEXT, rep::META_CONTEXT, named(0)));
        assert_eq!(all[3], (o::SET_META_CONTEXT, rep::META_CONTEXT, named(1)));
        assert_eq!(types(&[(style, &[]), (o::SET_META_CONTEXT, &set("nothing"))]), [rep::ACK, rep::ERR_UNKNOWN]);
    }
}

#[test]
fn abort_is_acknowledged() {
    let transcript = say(&[&FIXED[..], &option(o::ABORT, b"why")].concat());
    assert_eq!(replies(&transcript.sent), [(o::ABORT, rep::ACK, vec![])]);
    assert_eq!(transcript.closed, Some(Closed::Aborted));
}

#[test]
fn limits_of_options_hold() {
    let options = |count: usize| [FIXED.to_vec(), option(99, &[]).repeat(count)].concat();
    assert_eq!(ends(&options(16)), None);
    assert_eq!(ends(&options(17)), Some(Violation::TooManyOptions(16).into()));
    assert_eq!(types(&[(o::LIST, &[0; 513]), (o::LIST, &[])]), [rep::ERR_TOO_BIG, rep::ACK], "skipped, and on");
    let long = [FIXED.to_vec(), fields![wire::OPTION_MAGIC, 99u32, 4097u32]].concat();
    assert_eq!(ends(&long), Some(Violation::NegotiationBytes(4096).into()));
    assert_eq!(ends(&[&FIXED[..], &[b'x'; 16]].concat()), Some(Violation::OptionMagic(0x7878_7878_7878_7878).into()));
}

#[test]
fn a_server_that_stops_says_so() {
    let mut server = server(8192);
    server.stop();
    let bytes = [&FIXED[..], &option(o::GO, &go("disk", &[])), &option(o::ABORT, &[])].concat();
    let transcript = play(&mut server, [&bytes[..]]);
    let said = replies(&transcript.sent[18..]);
    assert_eq!(said, [(o::GO, rep::ERR_SHUTDOWN, vec![]), (o::ABORT, rep::ACK, vec![])]);
}
