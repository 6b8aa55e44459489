//! Commands to devices, on every backend. Only with a plain file, which supports none of them and returns an error.

mod common;

use common::everywhere;
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::{
    DeviceChecks, File, NvmeCommand, NvmeQueue, Options, ScsiCommand, Transfer, pool, spawn,
};

const RW: Options =
    Options { read: true, write: true, create: true, create_new: false, truncate: false, direct: false };
/// `ENOTTY`: the file does not support this call.
const NO_SUCH_CALL: i32 = 25;
/// `EINVAL`
const INVALID: i32 = 22;
/// `EOPNOTSUPP`
const UNSUPPORTED: i32 = 95;

fn command(opcode: u8) -> NvmeCommand {
    NvmeCommand { opcode, nsid: 1, timeout_ms: 1000, ..NvmeCommand::default() }
}

async fn opened(folder: &tempfile::TempDir) -> File {
    let file = File::open(folder.path().join("f"), RW).expect("opens");
    file.write_all_at(Slice::copy_from(&[7; 4096]), 0).await.expect("writes");
    file
}

#[test]
fn a_file_is_no_device_and_its_memory_comes_back() {
    everywhere(|reactor| {
        let folder = tempfile::tempdir().expect("makes a folder");
        reactor.block_on(async {
            let file = opened(&folder).await;
            assert_eq!(file.nvme_id().unwrap_err().raw_os_error(), Some(NO_SUCH_CALL));
            let (data, none) = (Transfer::In(pool().take(512)), Transfer::None);
            let (result, data, _) = file.nvme(NvmeQueue::Io, command(2), data, none, false).await;
            assert_eq!(result.unwrap_err().raw_os_error(), Some(NO_SUCH_CALL));
            assert!(matches!(data, Transfer::In(buffer) if buffer.len() == 512));
            let (data, none) = (Transfer::Out(Slice::copy_from(&[1; 8])), Transfer::None);
            let (result, data, _) = file.nvme(NvmeQueue::Admin, command(2), data, none, true).await;
            assert_eq!(result.unwrap_err().raw_os_error(), Some(INVALID), "data would come and none goes");
            assert!(matches!(data, Transfer::Out(slice) if slice[..] == [1; 8]));
            let read = ScsiCommand::new(&[0x12, 0, 0, 0, 36, 0], 1000).expect("it has six bytes");
            let (result, data) = file.scsi(read, Transfer::In(pool().take(36))).await;
            assert_eq!(result.unwrap_err().raw_os_error(), Some(NO_SUCH_CALL));
            assert!(matches!(data, Transfer::In(buffer) if buffer.len() == 36));
            file.drain().await;
        });
        assert_eq!(reactor.pool().counters().in_use_bytes, 0);
    });
}

#[test]
fn more_commands_than_threads_end_beside_other_operations() {
    everywhere(|reactor| {
        let folder = tempfile::tempdir().expect("makes a folder");
        reactor.block_on(async {
            let file = opened(&folder).await;
            let commands: Vec<_> = (0..200)
                .map(|_| {
                    let file = file.clone();
                    spawn(async move {
                        let (data, none) = (Transfer::In(Buffer::zeroed(64)), Transfer::None);
                        file.nvme(NvmeQueue::Io, command(2), data, none, false).await.0
                    })
                })
                .collect();
            let (result, buffer) = file.read_exact_at(Buffer::zeroed(4096), 0).await;
            result.expect("reads");
            assert_eq!(&buffer[..], [7; 4096]);
            for result in commands {
                let result = result.await.expect("is not aborted");
                assert_eq!(result.unwrap_err().raw_os_error(), Some(NO_SUCH_CALL));
            }
        });
    });
}

#[test]
fn commands_whose_futures_are_dropped_end_before_the_file_is_drained() {
    everywhere(|reactor| {
        let folder = tempfile::tempdir().expect("makes a folder");
        reactor.block_on(async {
            let file = opened(&folder).await;
            for _ in 0..20 {
                let (data, none) = (Transfer::Out(pool().take(512).freeze()), Transfer::None);
                let mut dropped = Box::pin(file.nvme(NvmeQueue::Io, command(1), data, none, true));
                assert!(futures_util::poll!(dropped.as_mut()).is_pending());
            }
            file.drain().await;
        });
        assert_eq!(reactor.pool().counters().in_use_bytes, 0);
    });
}

#[test]
fn tags_of_a_file_are_refused_or_the_kernel_is_known_to_ignore_them() {
    everywhere(|reactor| {
        let folder = tempfile::tempdir().expect("makes a folder");
        reactor.block_on(async {
            let file = opened(&folder).await;
            let knows = file.refuses_unknown_attributes(pool().take(512), pool().take(8)).await;
            let (read, data, tags) =
                file.read_tagged_at(pool().take(512), pool().take(8), 0, 0, DeviceChecks::NONE).await;
            assert_eq!((data.len(), tags.len()), (512, 8));
            let data = data.freeze();
            let (written, tags) = file.write_tagged_at(data, tags, 0, 0, DeviceChecks::NONE).await;
            assert_eq!(tags.len(), 8);
            for result in [read, written] {
                match (&knows, result) {
                    (Ok(false), Ok(512)) => {}
                    (Ok(true) | Err(_), Err(error)) => {
                        assert!(matches!(error.raw_os_error(), Some(INVALID | UNSUPPORTED)), "{error}");
                    }
                    (knows, result) => panic!("{result:?} of a kernel of which is known: {knows:?}"),
                }
            }
            let (result, ..) =
                file.read_tagged_at(pool().take(512), pool().take(8), u64::MAX, 0, DeviceChecks::NONE).await;
            assert_eq!(result.unwrap_err().raw_os_error(), Some(INVALID), "it fits no offset");
        });
        assert_eq!(reactor.pool().counters().in_use_bytes, 0);
    });
}
