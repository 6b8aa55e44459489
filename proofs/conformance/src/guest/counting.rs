//! Compare and Write on any kind of target, used as clusters do: several hosts increment a number in one block.

use anyhow::{Context, Result, bail};
use sealblock_block::{Device, Durability, DynDevice, ErrorKind, Expectations, Request, RequestKind, Response};
use sealblock_integrity::{Sealed, Tags};
use sealblock_runtime_memory::Slice;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, on_reactor, open};
use sealblock_units::{Extent, Lba};

/// The maximum number of attempts for each step: another host may be faster now and then, but not always.
const ATTEMPTS: u64 = 100_000;

/// Increments the number at the start of a block `times` times, with Compare and Write only; prints the number of
/// attempts that failed because another host was faster.
pub fn count_up(target: &TargetName, lba: u64, times: u64) -> Result<()> {
    let work = async {
        let opened = open(target, Access::Write).await?;
        let counted = count(&opened.device, Extent::one(Lba::new(lba)), times).await;
        opened.close(Ok(counted)).await
    };
    let late = on_reactor(work).map_err(|failure| anyhow::anyhow!("{failure}"))??;
    println!("{late} attempts were late");
    Ok(())
}

async fn count(device: &DynDevice, at: Extent, times: u64) -> Result<u64> {
    let (mut now, mut late) = (read(device, at).await?, 0);
    for _ in 0..times {
        let mut attempts = 0..ATTEMPTS;
        loop {
            attempts.next().context("others were always faster")?;
            let request = swap(device, at, now, now + 1);
            match device.execute(request).await {
                Ok(Response::Done) => break,
                Ok(_) => bail!("{} was answered with something else", RequestKind::CompareAndWrite.name()),
                Err(error) => match error.kind() {
                    ErrorKind::Miscompare { lba } if *lba == at.start() => late += 1,
                    _ => return Err(error.into()),
                },
            }
            now = read(device, at).await?;
        }
        now += 1;
    }
    Ok(late)
}

/// The number at the start of the block.
async fn read(device: &DynDevice, at: Extent) -> Result<u64> {
    let Response::Data(data) = device.execute(Request::read(at, Expectations::NONE)).await? else {
        bail!("no data were read")
    };
    let data = data.joined_data();
    let number = data.first_chunk::<8>().context("a block is longer than a number")?;
    Ok(u64::from_le_bytes(*number))
}

/// Writes the number `new` if the block contains `old`; the rest of the block is zeroes.
fn swap(device: &DynDevice, at: Extent, old: u64, new: u64) -> Request {
    let size = device.geometry().block_size;
    let block = |number: u64| {
        let mut bytes = vec![0; size.bytes()];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        Sealed::seal(Slice::copy_from(&bytes), size, None, &Tags::default())
    };
    Request::compare_and_write(at, block(old), block(new), Durability::Volatile)
}
