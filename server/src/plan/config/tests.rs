//! Valid configurations with their meaning, and invalid ones with the error.

use sealblock_stack::Access;

use super::*;
use crate::plan::DEFAULT_LISTEN;

/// One subsystem, after these lines.
fn with(lines: &str) -> String {
    format!("{lines}\n[[subsystems]]\nname = \"a\"\n[[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\n")
}

#[test]
fn the_documented_example_is_read_and_shows_the_defaults() {
    let plan = parse(include_str!("../../../../docs/sealblock.toml")).unwrap();
    assert_eq!(plan.limits, Limits::default());
    assert_eq!(plan.listeners, ["127.0.0.1:4420".parse().unwrap(), "[::1]:4420".parse().unwrap()]);
    assert_eq!(plan.listening[NBD].addresses, ["127.0.0.1:10809".parse().unwrap()]);
    let [photos, scratch] = plan.subsystems.as_slice() else { panic!("there are two subsystems") };
    assert_eq!(photos.nqn.as_str(), "nqn.2026-11.io.sealblock:photos");
    assert!(matches!(&photos.hosts, Hosts::Only(hosts) if hosts.len() == 1));
    let [one, seven] = photos.namespaces.as_slice() else { panic!("two namespaces") };
    assert_eq!((one.nsid, one.protection, one.read_only, one.uuid), (1, PiVisibility::Plain, false, None));
    assert_eq!((seven.nsid, seven.protection, seven.read_only), (7, PiVisibility::Protected, true));
    assert_eq!((one.nbd.as_deref(), seven.nbd.as_deref()), (None, Some("archive")));
    assert_eq!((scratch.serial.as_deref(), scratch.model.as_deref()), (Some("SCRATCH0001"), Some("scratch space")));
    assert_eq!((scratch.hosts == Hosts::Any, scratch.namespaces[0].uuid.unwrap()[0]), (true, 0x6f));
}

#[test]
fn a_member_is_served_as_one_where_that_is_said() {
    let usage = |lines: &str| parse(&(with("") + lines)).map(|plan| plan.subsystems[0].namespaces[0].usage);
    assert_eq!((usage(""), usage("as_member = true")), (Ok(Usage::Alone), Ok(Usage::AsMember)));
    assert!(usage("as_member = true\nread_only = true").unwrap_err().contains("as_member"));
}

#[test]
fn blocks_are_moved_unless_something_else_is_said() {
    let access = |lines: &str| parse(&(with("") + lines)).map(|plan| plan.subsystems[0].namespaces[0].access());
    assert_eq!((access(""), access("relocate = false")), (Ok(Access::Write), Ok(Access::WriteInPlace)));
    assert_eq!(access("read_only = true"), Ok(Access::Read));
}

#[test]
fn little_is_needed() {
    let plan = parse(&with("")).unwrap();
    assert!(plan.places_of(NBD).is_empty());
    assert_eq!((plan.listeners, plan.limits), (vec![DEFAULT_LISTEN], Limits::default()));
}

#[test]
fn a_serial_or_model_that_hosts_could_not_get_whole_is_refused() {
    let text = |line: String| parse(&format!("[[subsystems]]\nname = \"a\"\n{line}")).map(|_| ());
    for (name, most) in [("serial", 20), ("model", 40)] {
        let long = |chars: usize| text(format!("{name} = \"{}\"", "x".repeat(chars)));
        assert_eq!((long(1), long(most)), (Ok(()), Ok(())));
        assert_eq!(text(format!("{name} = \"a ~!b\"")), Ok(()), "spaces inside are kept");
        for bad in [
            "".to_owned(),
            "x".repeat(most + 1),
            "\u{e9}".to_owned(),
            "a\\tb".to_owned(),
            " a".to_owned(),
            "a ".to_owned(),
        ] {
            let why = text(format!("{name} = \"{bad}\"")).unwrap_err();
            assert!(why.contains("line 3") && why.contains(&format!("from 1 to {most} printable ASCII")), "{why}");
        }
    }
}

#[test]
fn a_listener_is_advertised_by_another_address_where_that_is_said() {
    let listeners =
        "[[listeners]]\naddress = \"0.0.0.0:4420\"\nadvertise = \"192.0.2.7\"\n[[listeners]]\naddress = \"[::1]:4420\"";
    let plan = parse(&with(listeners)).unwrap();
    assert_eq!(plan.advertised, [("0.0.0.0:4420".parse().unwrap(), "192.0.2.7:4420".parse().unwrap())]);
    let bad = parse(&with("[[listeners]]\naddress = \"[::1]:4420\"\nadvertise = \"here\"")).unwrap_err();
    assert!(bad.contains("line 3") && bad.contains("127.0.0.1:4420"), "{bad}");
}

#[test]
fn limits_are_read_by_name() {
    let limits = "[limits]\nconnections = 3\nio_queues = 2\ncommands = 64\nbytes_in_flight = 4096\ntotal_bytes_in_flight = \"1GiB\"\ntransfer_bytes = \"64KiB\"\n\
                  connect = \"1s\"\nidle = \"3min\"\nreceive = \"7s\"\ndrain = \"250ms\"";
    assert_eq!(
        parse(&with(limits)).unwrap().limits,
        Limits {
            connections: 3,
            io_queues: 2,
            commands: 64,
            bytes_in_flight: 4096,
            total_bytes_in_flight: 1 << 30,
            transfer_bytes: 64 << 10,
            connect: Duration::from_secs(1),
            idle: Duration::from_secs(180),
            receive: Duration::from_secs(7),
            drain: Duration::from_millis(250),
        }
    );
}

#[test]
fn a_subsystem_may_have_no_namespaces_yet() {
    let plan = parse("[[subsystems]]\nname = \"a\"").unwrap();
    assert!(plan.subsystems[0].namespaces.is_empty());
}

#[test]
fn bad_configurations_say_where_and_why() {
    let twice = with("") + &with("");
    let spaces = "\n[[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\nnsid = 1\n";
    for (text, words) in [
        (with("lisener = 1"), ["line 1", "unknown field `lisener`"]),
        (with("[limits]\nconnection = 1"), ["line 2", "unknown field `connection`"]),
        (with("[limits]\nconnections = -1"), ["line 2", "connections"]),
        (with("[limits]\nconnect = 10"), ["line 2", "connect"]),
        (with("[limits]\nconnect = \"10\""), ["line 2", "is not a time"]),
        (with("[limits]\ntransfer_bytes = \"lots\""), ["line 2", "not a size"]),
        (with("[limits]\ntransfer_bytes = \"4GiB\""), ["limits.transfer_bytes = 4294967296", "to 4294967295 bytes"]),
        (with("[[listeners]]\naddress = \"localhost\""), ["line 2", "127.0.0.1:4420"]),
        (with("[[listeners]]"), ["line 1", "missing field `address`"]),
        (String::new(), ["no subsystems", "[[subsystems]]"]),
        ("[[subsystems]]\n[[subsystems.namespaces]]\ntarget=\"v\"".to_owned(), ["line 1", "needs nqn"]),
        (with("").replace("name = \"a\"", "name = \"\""), ["line 2", "gives no valid NQN"]),
        (with("").replace("name = \"a\"", "nqn = \"a\""), ["line 3", "nqn.yyyy-mm"]),
        (with("").replace("mem:1MiB", "nosuch:1"), ["line 5", "is not a kind of target"]),
        (with("") + "protection = \"hidden\"", ["line 6", "hidden"]),
        (with("") + "uuid = \"1\"", ["line 6", "is not a UUID"]),
        (with("") + "uuid = \"00000000-0000-0000-0000-000000000000\"", ["line 6", "is not a UUID"]),
        (with("") + "nbd = \"a\\u001b[2J\"", ["line 6", "control characters are not allowed"]),
        (with("cores = 4294967296"), ["cores = 4294967296", "from 1 to 4096"]),
        (with("") + "nsid = 0", ["line 6", "expected a number of at least 1"]),
        (with("cores = 0"), ["line 1", "expected a number of at least 1"]),
        (with("") + "nsid = 1025", ["line 4", "at most 1024"]),
        (with("") + spaces, ["line 7", "duplicate namespace 1"]),
        (twice, ["line 7", "duplicate subsystem"]),
        ("[".to_owned(), ["line 1", "TOML"]),
    ] {
        let why = parse(&text).err().unwrap_or_else(|| panic!("{text} is taken"));
        for word in words {
            assert!(why.contains(word), "{text}\n'{word}' is missing in: {why}");
        }
    }
}

proptest::proptest! {
    #[test]
    fn any_text_is_read_or_refused(text in ".{0,200}") {
        let _ = parse(&text);
    }
}

#[test]
fn scrubs_are_for_all_and_each_namespace_may_have_it_otherwise() {
    let settings = |all: &str, own: &str| {
        let text = format!("{}{own}", with(all));
        parse(&text).map(|plan| plan.subsystems[0].namespaces[0].scrub)
    };
    assert_eq!(settings("", ""), Ok(sealblock_scrub::Settings::default()));
    let all = "[scrub]\nevery = \"7d\"\nrate = \"50MiB/s\"\npause_when_busy = false\n";
    let scrub = settings(all, "").unwrap();
    assert_eq!((scrub.every, scrub.rate.unwrap().get()), (Some(Duration::from_secs(604_800)), 50 << 20));
    assert!(!scrub.pause_when_busy);
    let own = settings(all, "scrub = { every = \"never\", rate = \"none\", pause_when_busy = true }\n").unwrap();
    assert_eq!(own, sealblock_scrub::Settings::default());
    let own = settings(all, "scrub = { rate = \"1KiB/s\" }\n").unwrap();
    assert_eq!((own.every, own.rate.unwrap().get()), (scrub.every, 1024));
    for (all, own, why) in [
        ("[scrub]\nspeed = 1\n", "", "line 2"),
        ("[scrub]\nevery = \"0s\"\n", "", "at least 1s"),
        ("[scrub]\nevery = 7\n", "", "line 2"),
        ("[scrub]\nevery = \"often\"\n", "", "or never"),
        ("[scrub]\nrate = \"50MiB\"\n", "", "or none"),
        ("", "scrub = { speed = 1 }\n", "line 6"),
    ] {
        let error = settings(all, own).unwrap_err();
        assert!(error.contains(why), "{all}{own}: {error}");
    }
}

#[test]
fn a_block_device_is_one_more_way_to_a_namespace() {
    let parsed = |tables: &str| parse(&(with("") + tables)).map(|plan| plan.subsystems[0].namespaces[0].clone());
    let plan = |tables: &str| parsed(tables).unwrap().block_device.unwrap();
    assert_eq!(parsed("").unwrap().block_device, None);
    let usual =
        BlockDevicePlan { number: Some(3), queues: 1, depth: 128, guard: None, read_only: false, tampering: None };
    assert_eq!(plan("[[ublk]]\ntarget = \"mem:1MiB\"\ndevice = 3"), usual);
    let table = "[[ublk]]\ntarget = \"mem:1MiB\"\ndevice = 3\n";
    let said = plan(&format!("read_only = true\n{table}pi = \"ip\"\nqueues = 64\ndepth = 7"));
    assert_eq!(said, BlockDevicePlan { queues: 64, depth: 7, guard: Some(HostGuard::Ip), read_only: true, ..usual });
    for (tables, why) in [
        ("[[ublk]]\ntarget = \"mem:2MiB\"\ndevice = 3".to_owned(), "mem:2MiB is not the target of a namespace"),
        ("[[ublk]]\ntarget = \"mem:1MiB\"".to_owned(), "device"),
        (format!("{table}queues = 0"), "line 6: queues = 0: from 1 to 64"),
        (format!("{table}queues = 65"), "from 1 to 64"),
        (format!("{table}depth = 0"), "depth = 0"),
        (format!("{table}pi = \"crc32c\""), "crc16"),
        (format!("{table}{table}"), "duplicate block device 3"),
        (format!("{table}[[ublk]]\ntarget = \"mem:1MiB\"\ndevice = 4"), "already has another block device"),
        (format!("{table}size = 4"), "unknown field"),
    ] {
        let refused = parsed(&tables).unwrap_err();
        assert!(refused.contains(why), "{tables}: {refused}");
    }
}

#[test]
fn limits_that_are_too_low_or_too_high_are_refused_by_their_names() {
    let limits = |line: &str| parse(&format!("{}[limits]\n{line}\n", with(""))).map(|plan| plan.limits);
    for line in [
        "connections = 1",
        "connections = 65536\ntransfer_bytes = \"1GiB\"\ntotal_bytes_in_flight = \"16TiB\"\nio_queues = 65535",
        "io_queues = 1",
        "commands = 32",
        "connect = \"1ms\"",
        "drain = \"0s\"",
        "idle = \"365d\"",
    ] {
        assert!(limits(line).is_ok(), "{line}: {:?}", limits(line));
    }
    for line in [
        "connections = 0",
        "io_queues = 0",
        "commands = 0",
        "commands = 31",
        "bytes_in_flight = 0",
        "total_bytes_in_flight = \"0KiB\"",
        "transfer_bytes = 0",
        "connect = \"0s\"",
        "idle = \"0ms\"",
        "receive = \"0s\"",
        "connections = 65537",
        "connections = 9223372036854775807",
        "io_queues = 65536",
        "commands = 65536",
        "bytes_in_flight = \"4GiB\"",
        "total_bytes_in_flight = \"17TiB\"",
        "total_bytes_in_flight = 9223372036854775807",
        "transfer_bytes = \"4GiB\"",
        "connect = \"366d\"",
        "idle = \"18446744073709551615ms\"",
        "receive = \"366d\"",
        "drain = \"18446744073709551615ms\"",
    ] {
        let error = limits(line).unwrap_err();
        let name = line.split(' ').next().unwrap();
        assert!(error.contains(&format!("limits.{name} = ")), "{line}: {error}");
    }
}

#[test]
fn a_configuration_is_a_file_of_some_length() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0).unwrap();
    // Reading this blocks until the kernel logs something.
    let error = super::read(std::path::Path::new("/proc/kmsg")).unwrap_err();
    assert!(error.to_string().contains("the kernel generates its content"), "{error}");
    for path in [std::path::Path::new("/dev/zero"), folder.path(), &pipe] {
        let error = super::read(path).unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }
    let long = folder.path().join("long");
    std::fs::write(&long, vec![b'#'; (16 << 20) + 1]).unwrap();
    let error = super::read(&long).unwrap_err();
    assert!(error.to_string().contains("larger than"), "{error}");
}

#[test]
fn of_a_wrong_file_a_part_of_one_line_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong");
    let long = "secret\u{1b}".repeat(1 << 16);
    let texts = [
        format!("cores = 2\n{long}"),
        format!("{long} = 1"),
        format!("\"{long}\" = 1"),
        format!("cores = \"{long}\""),
        with("").replace("mem:1MiB", &"x".repeat(1 << 20)),
        with("").replace("name = \"a\"", &format!("name = \"{}\"", "y".repeat(1 << 20))),
        format!("[limits]\nconnect = \"{}\"\n", "z".repeat(1 << 20)),
    ];
    for text in texts {
        std::fs::write(&file, &text).unwrap();
        let error = super::read(&file).unwrap_err().to_string();
        assert!(error.len() < 5000 && error.contains("line "), "{} bytes: {error}", error.len());
        assert!(!error.contains('\u{1b}'), "{error}");
    }
    // Even far into a line, the shown part contains the place of the error.
    std::fs::write(&file, format!("cores = [{}!", "1, ".repeat(1 << 16))).unwrap();
    let error = super::read(&file).unwrap_err().to_string();
    assert!(error.contains("column ") && error.contains("... ") && error.contains('!'), "{error}");
}

#[test]
fn a_file_that_is_not_utf_8_is_refused_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("latin1");
    std::fs::write(&file, b"cores = 2\n# caf\xe9\n").unwrap();
    let error = super::read(&file).unwrap_err();
    assert_eq!(error.cause(), sealblock_stack::Cause::Usage);
    assert!(error.to_string().contains("line 2: it is not UTF-8 (byte 0xe9)"), "{error}");
}
