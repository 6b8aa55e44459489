//! Targets that violate the protocol, fail, do not respond or disconnect.

use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use crate::common::fake::{Asked, Fake, Pages, Reply, good, serve};
use crate::common::{extent, read, run, verify, write};
use sealblock_block::{Device, ErrorKind, Gate, Request};
use sealblock_media_nvme_tcp::{ConnectError, NvmeTcpDevice, Options};
use sealblock_protocols_nvme::admin::{AdminCommand, Cns};
use sealblock_protocols_nvme::features::{AsynchronousEvent, FeatureId};
use sealblock_protocols_nvme::logs::{ErrorEntry, ErrorLog};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::{Status, StatusCode};
use sealblock_units::{Extent, Lba};

fn options() -> Options {
    Options { request_timeout: Duration::from_millis(200), max_connection_losses: 2, ..crate::common::options() }
}

async fn connect(address: SocketAddr) -> Result<NvmeTcpDevice, ConnectError> {
    let options = Options { connect_timeout: Duration::from_millis(500), ..options() };
    NvmeTcpDevice::connect(address.into(), crate::common::SUBNQN.parse().unwrap(), None, options).await
}

async fn open(fake: &Fake) -> Gate<NvmeTcpDevice> {
    let options = options();
    let device =
        NvmeTcpDevice::connect(fake.address.into(), crate::common::SUBNQN.parse().unwrap(), None, options).await;
    Gate::new("fake", device.unwrap())
}

fn cns(asked: &Asked) -> Option<Cns> {
    match asked {
        Asked::Admin(AdminCommand::Identify(ask)) => Some(ask.cns),
        _ => None,
    }
}

fn verified(asked: &Asked) -> Option<Extent> {
    match asked {
        Asked::Io(IoCommand::Verify(blocks)) => Some(blocks.extent),
        _ => None,
    }
}

#[test]
fn a_good_fake_works() {
    run(|| async {
        let device = open(&serve(good(), |_| None)).await;
        write(&device, extent(0, 2), 1).await.unwrap();
        assert!(read(&device, extent(0, 300)).await.unwrap().joined_data().iter().all(|&byte| byte == 0));
        verify(&device, extent(0, 4096)).await.unwrap();
        device.device().close().await;
    });
}

#[test]
fn garbage_in_any_page_is_an_error() {
    run(|| async {
        let pages = [
            Cns::Controller,
            Cns::ActiveNamespaces,
            Cns::Namespace,
            Cns::CommandSetNamespace,
            Cns::IndependentNamespace,
        ];
        for page in pages {
            for seed in [0x00_u8, 0x5A, 0xFF] {
                let bytes: Vec<u8> = (0..4096).map(|i| (i as u8).wrapping_mul(31) ^ seed | seed).collect();
                let fake = serve(good(), move |asked| (cns(asked) == Some(page)).then(|| Reply::Data(bytes.clone())));
                // It must end, and whatever is accepted must be usable.
                if let Ok(device) = connect(fake.address).await {
                    assert!(device.geometry().capacity_blocks > 0);
                }
            }
            let fake = serve(good(), move |asked| (cns(asked) == Some(page)).then(|| Reply::Data(vec![0; 512])));
            let error = connect(fake.address).await.err().unwrap();
            assert!(matches!(&error, ConnectError::Unexpected { why, .. } if why == "512 of 4096 bytes"), "{error}");
        }
    });
}

#[test]
fn impossible_answers_while_connecting_are_named() {
    run(|| async {
        let fake = serve(good(), |asked| match asked {
            Asked::Admin(AdminCommand::SetFeatures(ask)) if ask.fid == FeatureId::NumberOfQueues.code() => {
                Some(Reply::Done(0xFFFF_FFFF))
            }
            _ => None,
        });
        let error = connect(fake.address).await.err().unwrap();
        assert!(matches!(error, ConnectError::Unexpected { what: "Number of Queues", .. }), "{error}");
        for (status, is_timeout) in [(2_u64, false), (0, true)] {
            let fake = serve(good(), move |asked| match asked {
                Asked::Fabrics(command) if command.nsid.get() == 4 && command.cdw11.get() == 0x1C => {
                    Some(Reply::Done(status))
                }
                _ => None,
            });
            let error = connect(fake.address).await.err().unwrap();
            assert_eq!(matches!(error, ConnectError::Timeout { .. }), is_timeout, "{error}");
            assert_eq!(matches!(error, ConnectError::Unexpected { what: "CSTS", .. }), !is_timeout, "{error}");
        }
        let demanding = serve(good(), |asked| match asked {
            Asked::Fabrics(command) if command.nsid.get() == 1 => Some(Reply::Done(0x2_0001)),
            _ => None,
        });
        let error = connect(demanding.address).await.err().unwrap();
        assert!(matches!(error, ConnectError::AuthenticationRequired), "{error}");
    });
}

#[test]
fn less_data_than_promised_is_no_data() {
    run(|| async {
        let fake =
            serve(good(), |asked| matches!(asked, Asked::Io(IoCommand::Read(_))).then(|| Reply::Data(vec![7; 4092])));
        let error = read(&open(&fake).await, extent(0, 1)).await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Media { reason } if reason.contains("sent less")), "{error}");
    });
}

#[test]
fn statuses_keep_their_meaning() {
    run(|| async {
        type Is = fn(&ErrorKind) -> bool;
        let statuses: [(StatusCode, Is); 7] = [
            (StatusCode::NAMESPACE_WRITE_PROTECTED, |failure| *failure == ErrorKind::ReadOnly),
            (StatusCode::CAPACITY_EXCEEDED, |failure| matches!(failure, ErrorKind::NoSpace { .. })),
            (StatusCode::INVALID_OPCODE, |failure| matches!(failure, ErrorKind::Absent(_))),
            (StatusCode::WRITE_FAULT, |failure| matches!(failure, ErrorKind::Media { .. })),
            (
                StatusCode::INVALID_FIELD,
                |failure| matches!(failure, ErrorKind::Media { reason } if reason.contains("Invalid Field")),
            ),
            (StatusCode::ANA_PERSISTENT_LOSS, |failure| matches!(failure, ErrorKind::Unreachable { .. })),
            (
                StatusCode::new(7, 0x99),
                |failure| matches!(failure, ErrorKind::Media { reason } if reason.contains("0x799")),
            ),
        ];
        for (code, is_right) in statuses {
            let status = Status::from(code).with_dnr(true);
            let fake = serve(good(), move |asked| matches!(asked, Asked::Io(_)).then_some(Reply::Status(status)));
            let error = write(&open(&fake).await, extent(3, 1), 0).await.unwrap_err();
            assert!(is_right(error.kind()), "{error}");
        }
    });
}

#[test]
fn a_namespace_that_was_taken_away_is_away_and_no_medium_that_failed() {
    run(|| async {
        for is_there in [true, false] {
            let is_open = Rc::new(Cell::new(false));
            let opened = Rc::clone(&is_open);
            let fake = serve(good(), move |asked| match asked {
                Asked::Io(_) => Some(Reply::Status(StatusCode::INVALID_FIELD.status())),
                Asked::Admin(AdminCommand::Identify(ask)) if ask.cns == Cns::Namespace && opened.get() && !is_there => {
                    Some(Reply::Data(vec![0; 4096]))
                }
                _ => None,
            });
            let device = open(&fake).await;
            is_open.set(true);
            let error = read(&device, extent(0, 1)).await.unwrap_err();
            let is_away =
                matches!(error.kind(), ErrorKind::Unreachable { reason } if reason.contains("no namespace 1"));
            assert_eq!(is_away, !is_there, "{error}");
            assert_eq!(matches!(error.kind(), ErrorKind::Media { .. }), is_there, "{error}");
        }
    });
}

#[test]
fn a_status_that_allows_it_is_tried_again_and_not_for_ever() {
    run(|| async {
        for (failures, retries, succeeds) in [(2_u32, 2, true), (100, 3, false)] {
            let left = Cell::new(failures);
            let fake = serve(good(), move |asked| {
                let fails = matches!(asked, Asked::Io(_)) && left.replace(left.get().saturating_sub(1)) > 0;
                fails.then_some(Reply::Status(StatusCode::COMMAND_INTERRUPTED.status()))
            });
            let device = open(&fake).await;
            assert_eq!(write(&device, extent(3, 1), 0).await.is_ok(), succeeds);
            assert_eq!(device.device().counters().retries, retries);
        }
    });
}

#[test]
fn silence_and_hanging_up_end_with_the_losses_allowed() {
    run(|| async {
        for reply in [Reply::Silence, Reply::Close] {
            let answer = reply.clone();
            let fake = serve(good(), move |asked| matches!(asked, Asked::Io(_)).then(|| answer.clone()));
            let device = open(&fake).await;
            let error = read(&device, extent(0, 1)).await.unwrap_err();
            let is_told = |reason: &str| reason.contains("2 connections were lost");
            assert!(matches!(error.kind(), ErrorKind::Unreachable { reason } if is_told(reason)), "{reply:?}: {error}");
        }
    });
}

/// A script with which exactly the blocks `bad` fail Verify, and the error log names `named`.
fn damaged(bad: &'static [u64], named: Option<u64>) -> Fake {
    let last = Rc::new(Cell::new(None));
    let seen = Rc::clone(&last);
    let fake = serve(good(), move |asked| match (asked, verified(asked)) {
        (_, Some(extent)) => {
            let first = bad.iter().copied().find(|&lba| extent.contains(Lba::new(lba)));
            first.map(|_| Reply::Status(StatusCode::UNRECOVERED_READ_ERROR.status()))
        }
        (Asked::Admin(AdminCommand::GetLogPage(ask)), _) if ask.lid == 1 => named.and_then(|lba| {
            let (sqid, cid): (u16, u16) = seen.borrow_last()?;
            let mut log = ErrorLog::new(64);
            log.push(ErrorEntry::at_block(sqid, cid, StatusCode::UNRECOVERED_READ_ERROR.status(), 1, Lba::new(lba)));
            Some(Reply::Data(log.encode()))
        }),
        _ => None,
    });
    last.set(Some(Rc::clone(&fake.last_io)));
    fake
}

/// Reads a cell without removing its contents.
trait BorrowLast {
    fn borrow_last(&self) -> Option<(u16, u16)>;
}

impl BorrowLast for Cell<Option<Rc<std::cell::RefCell<Option<(u16, u16)>>>>> {
    fn borrow_last(&self) -> Option<(u16, u16)> {
        let held = self.take();
        let last = held.as_ref().and_then(|held| *held.borrow());
        self.set(held);
        last
    }
}

#[test]
fn damaged_blocks_are_found_without_hints_and_with_wrong_ones() {
    run(|| async {
        for named in [None, Some(0), Some(77), Some(1_000_000)] {
            let bad: &[u64] = &[3, 4, 300, 511, 4000];
            let device = open(&damaged(bad, named)).await;
            let error = verify(&device, extent(0, 4096)).await.unwrap_err();
            let bad_blocks = error.bad_blocks().unwrap_or_else(|| panic!("{error}")).as_slice();
            assert_eq!(bad_blocks.iter().map(|bad_block| bad_block.lba.get()).collect::<Vec<_>>(), bad, "{named:?}");
        }
    });
}

#[test]
fn a_target_that_fails_runs_but_never_a_block_is_an_honest_error() {
    run(|| async {
        let fake = serve(good(), |asked| {
            let fails = verified(asked).is_some_and(|extent| extent.len() > 1);
            fails.then_some(Reply::Status(StatusCode::GUARD_CHECK_ERROR.status()))
        });
        let device = open(&fake).await;
        let error = verify(&device, extent(0, 64)).await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Media { reason } if reason.contains("nothing wrong")), "{error}");
        assert!(fake.commands.get() < 1000, "{} commands", fake.commands.get());
    });
}

#[test]
fn a_verify_that_fails_once_and_then_no_more_is_no_damage() {
    run(|| async {
        let first = Cell::new(true);
        let fake = serve(good(), move |asked| {
            let fails = verified(asked).is_some() && first.replace(false);
            fails.then_some(Reply::Status(StatusCode::GUARD_CHECK_ERROR.status()))
        });
        verify(&open(&fake).await, extent(0, 64)).await.unwrap();
    });
}

#[test]
fn the_first_block_that_differs_is_found_by_reading() {
    run(|| async {
        let fake = serve(good(), |asked| match asked {
            Asked::Io(IoCommand::Compare(_)) => Some(Reply::Status(StatusCode::COMPARE_FAILURE.status())),
            _ => None,
        });
        let device = open(&fake).await;
        let mut bytes = vec![0; 4 * 4096];
        bytes[2 * 4096 + 5] = 1;
        let data = sealblock_runtime_memory::Slice::copy_from(&bytes);
        let size = sealblock_units::BlockSize::B4096;
        let data = sealblock_integrity::Sealed::seal(data, size, None, &Default::default());
        let error = device.execute(Request::compare(extent(10, 4), data)).await.unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Miscompare { lba: Lba::new(12) });
    });
}

/// A controller that reports its namespace as changed by `change` after the host has requested events; counts these
/// reports.
fn changing(change: fn(&mut Pages)) -> (Fake, Rc<Cell<u32>>) {
    let (is_changed, seen) = (Cell::new(false), Rc::new(Cell::new(0)));
    let counter = Rc::clone(&seen);
    let mut other = good();
    change(&mut other);
    let fake = serve(good(), move |asked| match asked {
        Asked::Admin(AdminCommand::AsynchronousEventRequest) if !is_changed.replace(true) => {
            Some(Reply::Done(u64::from(AsynchronousEvent::NAMESPACE_CHANGED.dword0())))
        }
        _ if is_changed.get() && cns(asked) == Some(Cns::Namespace) => {
            counter.set(counter.get() + 1);
            Some(Reply::Data(other.namespace.encode().to_vec()))
        }
        _ => None,
    });
    (fake, seen)
}

#[test]
fn a_namespace_that_changes_while_it_is_open_is_not_used_any_more() {
    run(|| async {
        let (fake, _) = changing(|pages| pages.namespace.lbaf[0].lbads = 9);
        let device = open(&fake).await;
        let error = loop {
            match read(&device, extent(0, 1)).await {
                Ok(_) => sealblock_runtime_reactor::sleep(Duration::from_millis(5)).await,
                Err(error) => break error,
            }
        };
        assert!(matches!(error.kind(), ErrorKind::Unreachable { reason } if reason.contains("its format")), "{error}");
    });
}

#[test]
fn a_namespace_that_is_resized_while_it_is_open_is_used_on() {
    run(|| async {
        let (fake, seen) = changing(|pages| pages.namespace.nsze = 9);
        let device = open(&fake).await;
        while seen.get() == 0 {
            sealblock_runtime_reactor::sleep(Duration::from_millis(5)).await;
        }
        for _ in 0..10 {
            read(&device, extent(0, 1)).await.unwrap();
            sealblock_runtime_reactor::sleep(Duration::from_millis(2)).await;
        }
    });
}
