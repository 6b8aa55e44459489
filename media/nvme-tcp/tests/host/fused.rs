//! Compare and Write as a fused pair: with our own target, and with one that replies as a script specifies.

use std::cell::Cell;
use std::rc::Rc;

use crate::common::fake::{self, Asked, Fake, Pages, Reply};
use crate::common::*;
use sealblock_block::{Ability, Device, Durability, ErrorKind, Expectations, Gate, Request, RequestKind, Response};
use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_nvme_tcp::{HostPort, NvmeTcpDevice, Options};
use sealblock_protocols_nvme::StatusCode;
use sealblock_protocols_nvme::identify::Fuses;
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::spawn;
use sealblock_units::{BlockSize, Lba};

const KIND: RequestKind = RequestKind::CompareAndWrite;

fn block(bytes: &[u8]) -> Sealed {
    let mut whole = vec![0; 4096];
    whole[..bytes.len()].copy_from_slice(bytes);
    Sealed::seal(Slice::copy_from(&whole), BlockSize::B4096, None, &Tags::default())
}

async fn swap(device: &impl Device, lba: u64, old: &[u8], new: &[u8]) -> Result<(), ErrorKind> {
    let request = Request::compare_and_write(extent(lba, 1), block(old), block(new), Durability::Volatile);
    match device.execute(request).await {
        Ok(Response::Done) => Ok(()),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.into_kind()),
    }
}

async fn first_bytes(device: &impl Device, lba: u64) -> u64 {
    match device.execute(Request::read(extent(lba, 1), Expectations::NONE)).await.unwrap() {
        Response::Data(data) => u64::from_le_bytes(data.joined_data()[..8].try_into().unwrap()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_block_is_written_if_it_is_as_expected() {
    run(|| async {
        let served = serve(&[(memory(BlockSize::B4096, None), PiVisibility::Plain)]);
        let device = open(&served, 1, options()).await;
        assert_eq!(device.abilities().of(KIND), Ability::Native);
        swap(&device, 5, &[], &[1]).await.unwrap();
        assert_eq!(swap(&device, 5, &[], &[2]).await, Err(ErrorKind::Miscompare { lba: Lba::new(5) }));
        assert_eq!(first_bytes(&device, 5).await, 1, "nothing was written");
        swap(&device, 5, &[1], &[3]).await.unwrap();
        assert_eq!(first_bytes(&device, 5).await, 3);
        assert!(device.execute(Request::flush()).await.is_ok());
        let two = Sealed::join(vec![block(&[]), block(&[])]);
        let request = Request::compare_and_write(extent(5, 2), two.clone(), two, Durability::Volatile);
        assert!(matches!(device.execute(request).await.unwrap_err().kind(), ErrorKind::Limit { .. }));
        served.target.stop();
    });
}

/// Increments a number in a block; tries again if another task was faster.
async fn count_up(device: Rc<Gate<NvmeTcpDevice>>, times: u64) {
    for _ in 0..times {
        loop {
            let now = first_bytes(&*device, 0).await;
            match swap(&*device, 0, &now.to_le_bytes(), &(now + 1).to_le_bytes()).await {
                Ok(()) => break,
                Err(ErrorKind::Miscompare { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
    }
}

/// A queue of two commands is full most of the time, so the halves wait for room one by one; no other command may come
/// between them.
#[test]
fn pairs_stay_together_on_a_queue_that_is_full_and_lose_no_count() {
    run(|| async {
        let served = serve(&[(memory(BlockSize::B4096, None), PiVisibility::Plain)]);
        let mut tasks = Vec::new();
        for queue_depth in [2, 128] {
            let options = Options { queue_depth, ..options() };
            let device = Rc::new(open(&served, 1, options).await);
            for _ in 0..4 {
                tasks.push(spawn(count_up(Rc::clone(&device), 25)));
            }
            let busy = Rc::clone(&device);
            tasks.push(spawn(async move {
                for i in 0..100 {
                    write(&*busy, extent(100 + i, 1), 1).await.unwrap();
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        let device = open(&served, 1, options()).await;
        assert_eq!(first_bytes(&device, 0).await, 200);
        served.target.stop();
    });
}

#[test]
fn where_no_pair_says_what_is_asked_there_is_none() {
    run(|| async {
        let devices = [
            (memory(BlockSize::B4096, Some(crc16())), PiVisibility::Protected),
            (memory(BlockSize::B4096, None), PiVisibility::Plain),
        ];
        let served = serve(&devices);
        let with_tags = open(&served, 1, options()).await;
        assert_eq!(with_tags.abilities().of(KIND), Ability::Absent, "a Compare compares tags, too");
        let narrow = open(&served, 2, Options { queue_depth: 1, ..options() }).await;
        assert_eq!(narrow.abilities().of(KIND), Ability::Absent, "no room for two commands");
        assert_eq!(swap(&narrow, 5, &[], &[1]).await, Err(ErrorKind::Absent(KIND)));
        let foreign = fake::serve(fake::good(), |_| None);
        assert_eq!(connect(&foreign).await.abilities().of(KIND), Ability::Absent, "FUSES does not have it");
        served.target.stop();
    });
}

async fn connect(fake: &Fake) -> Gate<NvmeTcpDevice> {
    let device = NvmeTcpDevice::connect(HostPort::from(fake.address), SUBNQN.parse().unwrap(), Some(1), options());
    Gate::new("fake", device.await.unwrap())
}

/// A target with fused commands that replies to Compares and Writes as specified, and the number of Compares that it
/// received.
fn answering(script: impl Fn(usize, bool) -> Option<Reply> + 'static) -> (Fake, Rc<Cell<usize>>) {
    let mut pages = fake::good();
    pages.controller.fuses = Fuses::COMPARE_AND_WRITE;
    let compares = Rc::new(Cell::new(0));
    let seen = Rc::clone(&compares);
    let target = fake::serve(Pages { ..pages }, move |asked| match asked {
        Asked::Io(IoCommand::Compare(_)) => {
            seen.set(seen.get() + 1);
            script(seen.get(), true)
        }
        Asked::Io(IoCommand::Write(_)) => script(seen.get(), false),
        _ => None,
    });
    (target, compares)
}

#[test]
fn a_pair_that_may_have_been_executed_is_not_sent_again() {
    run(|| async {
        let aborted = || Reply::Status(StatusCode::ABORTED_FAILED_FUSED.status());
        // The connection ends when the Write has arrived; or the reply is not what happened.
        type Script = Box<dyn Fn(usize, bool) -> Option<Reply>>;
        let scripts: [(&str, Script); 3] = [
            ("closed", Box::new(|_, is_compare| Some(if is_compare { Reply::Done(0) } else { Reply::Close }))),
            (
                "unknown",
                Box::new(move |_, is_compare| match is_compare {
                    true => Some(aborted()),
                    false => Some(Reply::Status(StatusCode::INTERNAL_ERROR.status())),
                }),
            ),
            (
                "not ready",
                Box::new(move |_, is_compare| match is_compare {
                    true => Some(aborted()),
                    false => Some(Reply::Status(StatusCode::NAMESPACE_NOT_READY.status())),
                }),
            ),
        ];
        for (name, script) in scripts {
            let (target, compares) = answering(script);
            let device = connect(&target).await;
            let error = swap(&device, 5, &[], &[1]).await.unwrap_err();
            assert!(matches!(error, ErrorKind::Unreachable { .. }), "{name}: {error}");
            let says_so = error.to_string().contains("may have been executed");
            assert!(says_so || name == "not ready", "{name}: {error}");
            assert_eq!(compares.get(), 1, "{name}");
            // The device continues.
            assert!(device.execute(Request::read(extent(7, 1), Expectations::NONE)).await.is_ok(), "{name}");
            assert_eq!(compares.get(), 1, "{name}");
        }
    });
}

#[test]
fn a_pair_whose_compare_failed_for_the_moment_is_sent_again() {
    run(|| async {
        let (target, compares) = answering(|compare, is_compare| {
            let code = if is_compare { StatusCode::NAMESPACE_NOT_READY } else { StatusCode::ABORTED_FAILED_FUSED };
            (compare < 3).then(|| Reply::Status(code.status()))
        });
        let device = connect(&target).await;
        swap(&device, 5, &[], &[1]).await.unwrap();
        assert_eq!(compares.get(), 3);
        let (target, compares) = answering(|_, is_compare| {
            let code = if is_compare { StatusCode::COMPARE_FAILURE } else { StatusCode::ABORTED_FAILED_FUSED };
            Some(Reply::Status(code.status()))
        });
        let device = connect(&target).await;
        assert_eq!(swap(&device, 5, &[], &[1]).await, Err(ErrorKind::Miscompare { lba: Lba::new(5) }));
        assert_eq!(compares.get(), 1);
    });
}
