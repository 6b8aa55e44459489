//! Names that are targets, names that are none and why, and what holds for all of them.

use std::num::NonZeroU16;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn parse(text: &str) -> TargetName {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn file(path: &str) -> TargetName {
    TargetName::File(PathBuf::from(path))
}

fn raw(path: &str) -> TargetName {
    TargetName::Raw(PathBuf::from(path))
}

fn memory(bytes: u64) -> TargetName {
    TargetName::Memory { size: ByteCount::new(bytes), preallocate: false }
}

fn refused(text: &str) -> (usize, TargetErrorKind) {
    let error = text.parse::<TargetName>().expect_err(text);
    (error.column, error.problem)
}

#[test]
fn paths_and_devices() {
    for (text, target) in [
        ("disk.img", file("disk.img")),
        ("file:disk.img", file("disk.img")),
        ("/var/lib/a:b,c]", file("/var/lib/a:b,c]")),
        ("./-", file("./-")),
        ("file:-", file("-")),
        ("raw:disk.img", raw("disk.img")),
        ("raw:/dev/sda", raw("/dev/sda")),
        ("raw:raw:a", raw("raw:a")),
        ("[raw:a,b]", raw("a,b")),
        ("file:[a]", file("[a]")),
        ("[disk.img]", file("disk.img")),
        ("/dev/shm/v", file("/dev/shm/v")),
        ("/dev/sda1", file("/dev/sda1")),
        ("file:/dev/sda", file("/dev/sda")),
        ("/dev/sda", TargetName::Linux { path: PathBuf::from("/dev/sda"), drive_makes_tags: None }),
        (
            "/dev/nvme1n2?pract=1",
            TargetName::Linux { path: PathBuf::from("/dev/nvme1n2"), drive_makes_tags: Some(true) },
        ),
        ("/dev/nvme1n2p1?pract=1", file("/dev/nvme1n2p1?pract=1")),
        ("mem:1GiB", memory(1 << 30)),
        ("mem:1GiB?preallocate", TargetName::Memory { size: ByteCount::new(1 << 30), preallocate: true }),
        ("null:4096", TargetName::Null(ByteCount::new(4096))),
    ] {
        assert_eq!(parse(text), target, "{text}");
    }
}

#[test]
fn relative_paths_begin_where_they_are_put() {
    for (text, put) in [
        ("v", "/etc/s/v"),
        ("../v", "/etc/s/../v"),
        ("file:-", "/etc/s/-"),
        ("raw:v", "raw:/etc/s/v"),
        ("/var/v", "/var/v"),
        ("/dev/sda", "/dev/sda"),
        ("mirror:a,[stripe:/b,c]", "mirror:/etc/s/a,[stripe:/b,/etc/s/c]"),
        ("offset:0..1,v", "offset:0..1,/etc/s/v"),
        ("fault:[read-error@1],v", "fault:[read-error@1],/etc/s/v"),
        ("mem:1MiB", "mem:1MiB"),
        ("mem:1MiB?preallocate", "mem:1MiB?preallocate"),
        ("nbd://h/v", "nbd://h/v"),
        ("nbd+unix:///v?socket=/run/s", "nbd+unix:///v?socket=/run/s"),
        ("nbd+unix:///?connections=2&socket=a%20b%26c", "nbd+unix:///?socket=/etc/s/a%20b%26c&connections=2"),
        ("nbd+unix:///a%2Fb/c?socket=s", "nbd+unix:///a/b/c?socket=/etc/s/s"),
        ("nvme+tcp://h/nqn.2026-01.org.example:v", "nvme+tcp://h/nqn.2026-01.org.example:v"),
    ] {
        assert_eq!(parse(text).relative_to(Path::new("/etc/s")).to_string(), put, "{text}");
        assert_eq!(parse(text).relative_to(Path::new("")), parse(text), "{text}");
    }
}

#[test]
fn nvme_tcp_names() {
    let TargetName::NvmeTcp { address, nqn, nsid, .. } =
        parse("nvme+tcp://[::1]:8009/nqn.2014-08.org.nvmexpress%3Auuid:x/7")
    else {
        panic!("another kind");
    };
    assert_eq!((address.host, address.port), (Host::Ipv6(std::net::Ipv6Addr::LOCALHOST), NonZeroU16::new(8009)));
    assert_eq!((nqn.as_str(), nsid), ("nqn.2014-08.org.nvmexpress:uuid:x", NonZeroU32::new(7)));
    let TargetName::NvmeTcp { address, nsid, .. } = parse("nvme+tcp://storage-1.example.org/nqn.x") else {
        panic!("another kind");
    };
    assert_eq!((address.host, address.port), (Host::Name("storage-1.example.org".to_owned()), None));
    assert_eq!(nsid, None);
}

#[test]
fn nbd_names() {
    for (text, name) in [
        ("nbd://127.0.0.1", ""),
        ("nbd://127.0.0.1/", ""),
        ("nbd://127.0.0.1:10809/a/b%20c", "a/b c"),
        ("nbd://127.0.0.1/%C3%A4%2C", "\u{e4},"),
        ("nbd://127.0.0.1/a%3Fb?connections=4", "a?b"),
    ] {
        assert!(matches!(parse(text), TargetName::Nbd { export, .. } if export == name), "{text}");
    }
}

#[test]
fn groups_nest_in_brackets() {
    let stripe = TargetName::Group {
        kind: GroupKind::Stripe { chunk: None, labelled: true },
        members: vec![file("A"), file("B")],
    };
    let mirror = TargetName::Group { kind: GroupKind::Mirror, members: vec![stripe, file("C")] };
    assert_eq!(parse("mirror:[stripe:A,B],C"), mirror);
    assert_eq!(parse("mirror:[stripe:A,[B]],C"), mirror);
    assert_eq!(mirror.to_string(), "mirror:[stripe:A,B],C");
    let chunk = Some(ByteCount::new(16 << 10));
    let sized =
        TargetName::Group { kind: GroupKind::Stripe { chunk, labelled: true }, members: vec![file("A"), file("B")] };
    assert_eq!(parse("stripe-16KiB:A,B"), sized);
    assert_eq!(sized.to_string(), "stripe-16KiB:A,B");
    for (text, chunk) in [("stripe-nolabel:A,B", None), ("stripe-16KiB-nolabel:A,B", chunk)] {
        let members = vec![file("A"), file("B")];
        let unlabelled = TargetName::Group { kind: GroupKind::Stripe { chunk, labelled: false }, members };
        assert_eq!((parse(text), unlabelled.to_string().as_str()), (unlabelled, text));
    }
    assert_eq!(parse("stripe-16KiB:A,B").without_label(), parse("stripe-16KiB-nolabel:A,B"));
    assert_eq!(parse("mirror:A,B").without_label(), parse("mirror:A,B"));
    for text in ["stripe-16KiBnolabel:A,B", "stripe-nolabel-nolabel:A,B", "stripe--nolabel:A,B"] {
        assert!(matches!(refused(text).1, TargetErrorKind::Size(_)), "{text}");
    }
    assert_eq!(parse("stripe-16"), file("stripe-16"), "without a colon it is a path");
    let commas = TargetName::Group { kind: GroupKind::Multipath, members: vec![file("a,b"), file("c[1,2]")] };
    assert_eq!(parse("multipath:[a,b],c[1,2]"), commas);
}

#[test]
fn an_offset_and_a_fault_work_on_all_that_follows() {
    let mirror = Box::new(parse("mirror:A,B"));
    let range = "100..199".parse().unwrap();
    assert_eq!(parse("offset:100..199,mirror:A,B"), TargetName::Offset { range, target: mirror.clone() });
    let rules = "seed=7;read-error@100..200".to_owned();
    let fault = TargetName::Fault { rules, target: mirror };
    assert_eq!(parse("fault:[seed=7;read-error@100..200],[mirror:A,B]"), fault);
    let TargetName::Group { members, .. } = parse("mirror:[offset:0..9,A],[fault:[x[1],y],B]") else {
        panic!("another kind")
    };
    assert_eq!(members[0], TargetName::Offset { range: "0..9".parse().unwrap(), target: Box::new(file("A")) });
    assert_eq!(members[1], TargetName::Fault { rules: "x[1],y".to_owned(), target: Box::new(file("B")) });
}

#[test]
fn what_is_no_target_says_what_and_where() {
    for (text, column, problem) in [
        ("", 1, TargetErrorKind::Missing),
        ("file:", 6, TargetErrorKind::Missing),
        ("raw:", 5, TargetErrorKind::Missing),
        ("raw:a\0b", 6, TargetErrorKind::ZeroByte),
        ("-", 1, TargetErrorKind::Standard),
        ("memm:1GiB", 1, TargetErrorKind::Unknown("memm:".to_owned())),
        ("http://a/b", 1, TargetErrorKind::Unknown("http:".to_owned())),
        ("a\0b", 2, TargetErrorKind::ZeroByte),
        ("mem:0", 5, TargetErrorKind::NoBytes),
        ("mem:0?preallocate", 5, TargetErrorKind::NoBytes),
        ("mem:1GiB?", 10, TargetErrorKind::MemoryOption(String::new())),
        ("mem:1GiB?preallocate=yes", 10, TargetErrorKind::MemoryOption("preallocate=yes".to_owned())),
        ("mem:1GiB?preallocate&preallocate", 10, TargetErrorKind::MemoryOption("preallocate&preallocate".to_owned())),
        ("mem:1GiB?prealloc", 10, TargetErrorKind::MemoryOption("prealloc".to_owned())),
        ("nvme+tcp:host", 10, TargetErrorKind::Slashes("nvme+tcp:")),
        ("nbd:host", 5, TargetErrorKind::Slashes("nbd:")),
        ("mirror:A", 8, TargetErrorKind::FewLegs("mirror")),
        ("mirror:A,", 10, TargetErrorKind::Missing),
        ("mirror:A,,B", 10, TargetErrorKind::Missing),
        ("mirror:[A,B", 8, TargetErrorKind::Unclosed),
        ("mirror:\u{e4},[", 10, TargetErrorKind::Unclosed),
        ("mirror:A],B", 9, TargetErrorKind::Unopened),
        ("mirror:[A]x,B", 11, TargetErrorKind::BehindBracket),
        ("[[A]]", 2, TargetErrorKind::Doubled),
        ("[]", 2, TargetErrorKind::Missing),
        ("offset:0..9", 12, TargetErrorKind::NoInner("offset")),
        ("mirror:offset:0..9,A", 19, TargetErrorKind::NoInner("offset")),
        ("fault:read-error,A", 7, TargetErrorKind::NoRules),
        ("fault:[],A", 8, TargetErrorKind::NoRules),
        ("fault:[x]", 10, TargetErrorKind::NoInner("fault")),
        ("fault:[x]A", 10, TargetErrorKind::NoInner("fault")),
    ] {
        assert_eq!(refused(text), (column, problem), "{text}");
    }
    assert!(matches!(refused("mem:lots"), (5, TargetErrorKind::Size(_))));
    assert!(matches!(refused("offset:9..0,A"), (8, TargetErrorKind::Range(_))));
}

#[test]
fn what_is_no_uri_says_what_and_where() {
    let text = |problem: fn(String) -> TargetErrorKind, text: &str| problem(text.to_owned());
    for (name, column, problem) in [
        ("nvme+tcp:///nqn.x", 12, TargetErrorKind::NoHost),
        ("nvme+tcp://h", 13, TargetErrorKind::NoNqn),
        ("nvme+tcp://h/", 14, TargetErrorKind::NoNqn),
        ("nvme+tcp://h/disk", 14, text(TargetErrorKind::Nqn, "disk")),
        ("nvme+tcp://h/nqn.a%0Ab", 14, text(TargetErrorKind::Nqn, "nqn.a\nb")),
        ("nvme+tcp://h/nqn.x/0", 20, text(TargetErrorKind::Nsid, "0")),
        ("nvme+tcp://h/nqn.x/+1", 20, text(TargetErrorKind::Nsid, "+1")),
        ("nvme+tcp://h/nqn.x/4294967295", 20, text(TargetErrorKind::Nsid, "4294967295")),
        ("nvme+tcp://h:0/nqn.x", 14, text(TargetErrorKind::Port, "0")),
        ("nvme+tcp://h:65536/nqn.x", 14, text(TargetErrorKind::Port, "65536")),
        ("nvme+tcp://::1/nqn.x", 12, TargetErrorKind::NoHost),
        ("nvme+tcp://fe80::1/nqn.x", 12, text(TargetErrorKind::Host, "fe80::1")),
        ("nvme+tcp://[fe80::g]/nqn.x", 12, text(TargetErrorKind::Host, "[fe80::g]")),
        ("nvme+tcp://[::1]x/nqn.x", 12, text(TargetErrorKind::Host, "[::1]x")),
        ("nvme+tcp://[::1/nqn.x", 12, TargetErrorKind::Unclosed),
        ("nbd://a b/x", 7, text(TargetErrorKind::Host, "a b")),
        ("nbd://u@h/x", 8, TargetErrorKind::UriPart('@')),
        ("/dev/ng0n1?pract=2", 12, text(TargetErrorKind::DriveOption, "pract=2")),
        ("/dev/nvme0n1?", 14, text(TargetErrorKind::DriveOption, "")),
        ("/dev/sda?pract=1", 10, text(TargetErrorKind::DriveOption, "pract=1")),
        ("nbd://h/x?tls", 11, text(TargetErrorKind::NbdOption, "tls")),
        ("nbd://h/x?connections=0", 11, text(TargetErrorKind::NbdOption, "connections=0")),
        ("nbd://h/x?connections=+1", 11, text(TargetErrorKind::NbdOption, "connections=+1")),
        ("nbd://h/x?connections=2&a", 11, text(TargetErrorKind::NbdOption, "connections=2&a")),
        ("nbd+unix:/v?socket=s", 10, TargetErrorKind::Slashes("nbd+unix:")),
        ("nbd+unix://h/v?socket=s", 12, TargetErrorKind::SocketHost),
        ("nbd+unix://", 12, TargetErrorKind::SocketHost),
        ("nbd+unix:///v", 14, TargetErrorKind::NoSocket),
        ("nbd+unix:///v?connections=2", 15, TargetErrorKind::NoSocket),
        ("nbd+unix:///v?socket=", 15, TargetErrorKind::NoSocket),
        ("nbd+unix:///v?socket=a%00", 15, TargetErrorKind::NoSocket),
        ("nbd+unix:///v?socket=a%2", 23, TargetErrorKind::Percent),
        ("nbd+unix:///v?socket=a&socket=b", 24, text(TargetErrorKind::OptionTwice, "socket=b")),
        ("nbd+unix:///v?socket=a&tls", 24, text(TargetErrorKind::NbdOption, "tls")),
        ("nbd+unix:///v#x?socket=a", 14, TargetErrorKind::UriPart('#')),
        ("nbd://h/a%2", 10, TargetErrorKind::Percent),
        ("nbd://h/a%zz", 10, TargetErrorKind::Percent),
        ("nbd://h/%FF", 9, TargetErrorKind::Percent),
        ("nbd://h/%00", 9, TargetErrorKind::Export),
    ] {
        assert_eq!(refused(name), (column, problem), "{name}");
    }
}

#[test]
fn the_limits_hold_and_what_lies_within_them_passes() {
    let long = |bytes: usize| format!("/{}", "x".repeat(bytes - 1));
    assert_eq!(parse(&long(MAX_TEXT_BYTES)), file(&long(MAX_TEXT_BYTES)));
    assert_eq!(refused(&long(MAX_TEXT_BYTES + 1)), (MAX_TEXT_BYTES + 1, TargetErrorKind::TooLong));

    let deep = |levels: usize| format!("{}A", "offset:0..9,".repeat(levels));
    assert!(deep(MAX_DEPTH).parse::<TargetName>().is_ok());
    assert_eq!(refused(&deep(MAX_DEPTH + 1)).1, TargetErrorKind::TooDeep);

    let wide = |members: usize| format!("mirror:{}", vec!["A"; members].join(","));
    assert!(matches!(parse(&wide(MAX_MEMBERS)), TargetName::Group { members, .. } if members.len() == MAX_MEMBERS));
    assert_eq!(refused(&wide(MAX_MEMBERS + 1)).1, TargetErrorKind::ManyMembers("mirror"));

    let named = |bytes: usize| format!("nvme+tcp://h/nqn.{}", "x".repeat(bytes - 4));
    assert!(named(223).parse::<TargetName>().is_ok());
    assert!(matches!(refused(&named(224)).1, TargetErrorKind::Nqn(_)));
}

#[test]
fn an_error_reads_as_a_sentence_with_something_to_try() {
    let error = "mirror:A".parse::<TargetName>().unwrap_err();
    assert_eq!(error.to_string(), "column 8: a mirror needs at least two targets; try mirror:A,B");
}

/// Paths whose brackets are in pairs, as they must be in a group.
fn paths() -> impl Strategy<Value = TargetName> {
    prop_oneof!["[a-z/:,. +\u{e4}-]{0,12}(\\[[a-z,]{0,4}\\])?[a-z:]{1,4}", "/dev/sd[a-z]", "mem:[a-z]", "\\[x\\]"]
        .prop_flat_map(|path| prop_oneof![Just(file(&path)), Just(raw(&path))])
}

fn addresses() -> impl Strategy<Value = Address> {
    let hosts = prop_oneof!["[a-z0-9._-]{1,12}".prop_map(Host::Name), any::<std::net::Ipv6Addr>().prop_map(Host::Ipv6)];
    (hosts, any::<Option<NonZeroU16>>()).prop_map(|(host, port)| Address { host, port })
}

fn leaves() -> impl Strategy<Value = TargetName> {
    let time = || proptest::option::of((1..=u64::from(u32::MAX)).prop_map(Duration::from_millis));
    let times = (time(), time(), time(), any::<Option<NonZeroU16>>());
    let options = (any::<[bool; 2]>(), any::<Option<bool>>(), any::<[Option<NonZeroU16>; 2]>(), any::<bool>(), times)
        .prop_map(|([header_digest, data_digest], target_makes_tags, [queues, depth], named, times)| RemoteOptions {
            header_digest,
            data_digest,
            target_makes_tags,
            queues,
            depth,
            host_nqn: named.then(|| "nqn.?&=:\u{e4}".to_owned()),
            timeout: times.0,
            keep_alive: times.1,
            reconnect: times.2,
            attempts: times.3,
        });
    let nvme = (addresses(), "nqn\\.\\PC{0,20}", any::<Option<NonZeroU32>>(), options).prop_map(
        |(address, nqn, nsid, options)| {
            let nsid = nsid.filter(|nsid| nsid.get() != u32::MAX);
            TargetName::NvmeTcp { address, nqn, nsid, options }
        },
    );
    prop_oneof![
        paths(),
        any::<Option<bool>>()
            .prop_map(|drive_makes_tags| TargetName::Linux { path: PathBuf::from("/dev/ng0n1"), drive_makes_tags }),
        (1..=u64::MAX).prop_map(memory),
        (1..=u64::MAX).prop_map(|bytes| TargetName::Null(ByteCount::new(bytes))),
        nvme,
        (addresses(), ".{0,12}", any::<Option<NonZeroU16>>()).prop_filter_map(
            "no zero byte",
            |(address, export, connections)| {
                (!export.contains('\0')).then_some(TargetName::Nbd {
                    address: NbdAddress::Tcp(address),
                    export,
                    connections,
                })
            }
        ),
    ]
}

fn targets() -> impl Strategy<Value = TargetName> {
    leaves().prop_recursive(4, 24, 3, |inner| {
        let sized = (1..=u64::MAX, any::<bool>())
            .prop_map(|(bytes, labelled)| GroupKind::Stripe { chunk: Some(ByteCount::new(bytes)), labelled });
        let stripe = any::<bool>().prop_map(|labelled| GroupKind::Stripe { chunk: None, labelled });
        let kinds = prop_oneof![Just(GroupKind::Mirror), stripe, sized, Just(GroupKind::Multipath)];
        let group = (kinds, prop::collection::vec(inner.clone(), 2..4));
        let range = (any::<u32>(), any::<Option<u32>>()).prop_map(|(first, more)| match more {
            Some(more) => format!("{first}..{}", u64::from(first) + u64::from(more)),
            None => format!("{first}.."),
        });
        let fault = ("[a-z=;@,.]{1,12}(\\[[a-z,]{0,3}\\])?", inner.clone());
        prop_oneof![
            group.prop_map(|(kind, members)| TargetName::Group { kind, members }),
            (range, inner).prop_map(|(range, target)| TargetName::Offset {
                range: range.parse().expect("first and last are in order"),
                target: Box::new(target)
            }),
            fault.prop_map(|(rules, target)| TargetName::Fault { rules, target: Box::new(target) }),
        ]
    })
}

/// Texts made of what the syntax is made of, so that many of them get far into it.
fn almost_targets() -> impl Strategy<Value = String> {
    let words = prop::sample::select(vec![
        "mirror:",
        "stripe:",
        "stripe-",
        "nolabel",
        "offset:",
        "fault:",
        "file:",
        "raw:",
        "mem:",
        "nbd://",
        "nvme+tcp://",
        "nqn.",
        "[",
        "]",
        ",",
        "..",
        "/",
        ":",
        "%",
        "%41",
        "1",
        "4KiB",
        "a",
        "-",
        "\u{e4}",
        "?",
        " ",
    ]);
    prop::collection::vec(words, 0..24).prop_map(|words| words.concat())
}

fn reads_back(text: &str) -> Result<(), TestCaseError> {
    if let Ok(target) = text.parse::<TargetName>() {
        prop_assert_eq!(target.to_string().parse(), Ok(target));
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_target_prints_as_it_reads(target in targets()) {
        prop_assert_eq!(target.to_string().parse(), Ok(target));
    }

    #[test]
    fn no_text_panics_and_what_is_read_reads_back(text in almost_targets()) {
        reads_back(&text)?;
    }

    #[test]
    fn no_random_text_panics(text: String) {
        reads_back(&text)?;
    }
}

#[test]
fn whole_linux_devices_are_recognised_and_nothing_else() {
    for path in ["/dev/nvme0n1", "/dev/nvme12n34", "/dev/ng0n1", "/dev/sda", "/dev/sdaa", "/dev/sg0", "/dev/sg12"] {
        assert!(is_linux_device(path), "{path}");
    }
    for path in [
        "/dev/nvme0",
        "/dev/nvme0n1p1",
        "/dev/ng0",
        "/dev/sda1",
        "/dev/sd",
        "/dev/sg",
        "/dev/sga",
        "/dev/shm/v",
        "/dev/vda",
        "sda",
    ] {
        assert!(!is_linux_device(path), "{path}");
    }
}

#[test]
fn what_is_in_memory_anywhere_is_volatile() {
    let is_volatile = |name: &str| name.parse::<TargetName>().unwrap().is_volatile();
    for name in ["mem:1MiB", "offset:0..9,mem:1MiB", "mirror:a,[fault:[flip@5],mem:1MiB]"] {
        assert!(is_volatile(name), "{name}");
    }
    for name in ["v", "raw:v", "null:1MiB", "mirror:a,b", "nbd://localhost/e"] {
        assert!(!is_volatile(name), "{name}");
    }
}
