package relay

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"aether/mtls/record"
)

// TLS relays between a plain connection (side A) and a mesh hop (side B), whose
// record layer is rec. first, which may be nil, was read from plain already and
// goes to the hop before anything else. It returns as Plain does. Counts are of
// plaintext.
func TLS(ctx context.Context, plain, hop *net.TCPConn, rec record.Conn, first []byte, o Options) Result {
	r, err := newRun(plain, hop, o)
	if err != nil {
		return r.result(err)
	}
	t := &tlsRun{run: r, rec: rec}
	t.inPlace, _ = rec.(record.InPlace)
	return r.run(ctx,
		func() error { return t.toHop(first) },
		t.fromHop)
}

// tlsRun adds the hop's record layer to a run.
type tlsRun struct {
	*run
	rec     record.Conn
	inPlace record.InPlace // rec, when it can; else nil

	wmu    sync.Mutex // held from sealing to the end of the write: records go out in order
	closed bool       // close_notify was sent
}

// toHop seals what the plain side says. What one read brought is sent with one write.
func (t *tlsRun) toHop(first []byte) error {
	if err := t.sendSealed(first, 0); err != nil {
		return err
	}
	var how filler = plaintextFill{}
	if t.inPlace != nil {
		how = &recordFill{}
	}
	in := newIntake(&t.a, how)
	for {
		b, err := in.read()
		if err == nil {
			switch {
			case len(b) == 0:
				in.release()
				return t.closeHop()
			case t.inPlace != nil:
				err = t.sendInPlace(in.buf.b, in.n)
			default:
				err = t.sendSealed(b, in.level)
			}
			in.adapt()
		}
		in.release()
		if err != nil {
			return err
		}
	}
}

// sendSealed seals b by copying.
func (t *tlsRun) sendSealed(b []byte, level int) error {
	if len(b) == 0 {
		return nil
	}
	buf := take(level)
	defer buf.put()
	room := buf.size.slots * record.MaxPlain
	for len(b) > 0 {
		n := min(len(b), room)
		if err := t.locked(func() error {
			out, err := t.rec.Seal(buf.b[:0], b[:n])
			if err != nil {
				return t.broken(err)
			}
			return t.write(out)
		}); err != nil {
			return err
		}
		t.res.AtoB += int64(n)
		b = b[n:]
	}
	return nil
}

// sendInPlace seals n bytes that recordFill laid into buf.
func (t *tlsRun) sendInPlace(buf []byte, n int) error {
	total := n
	if err := t.locked(func() error {
		if t.inPlace.Pending() {
			if err := t.write(t.inPlace.Take(nil)); err != nil {
				return err
			}
		}
		end := 0
		for n > 0 {
			m := min(n, record.MaxPlain)
			rec, err := t.inPlace.SealRecord(buf[end:], m)
			if err != nil {
				return t.broken(err)
			}
			n -= m
			end += len(rec)
		}
		return t.write(buf[:end])
	}); err != nil {
		return err
	}
	t.res.AtoB += int64(total)
	return nil
}

// locked runs f with the hop's writing half to itself, then sends what the
// other direction could not meanwhile.
func (t *tlsRun) locked(f func() error) error {
	t.wmu.Lock()
	err := f()
	t.wmu.Unlock()
	if err != nil {
		return err
	}
	return t.flush()
}

// flush sends what the record layer itself wants sent. When the writing half is
// taken, whoever has it flushes afterwards: the reading half never waits for it.
func (t *tlsRun) flush() error {
	for t.rec.Pending() {
		if !t.wmu.TryLock() {
			return nil
		}
		out := t.rec.Take(nil)
		var err error
		if !t.closed {
			err = t.write(out)
		}
		t.wmu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *tlsRun) write(b []byte) error {
	if _, err := t.b.Write(b); err != nil {
		return &sideError{B, fmt.Errorf("relay: write to the hop: %w", err)}
	}
	return nil
}

// closeHop ends the direction to the hop: close_notify, then FIN.
func (t *tlsRun) closeHop() error {
	t.over(&t.a)
	if err := t.locked(func() error {
		out := t.rec.CloseNotify(nil)
		t.closed = true
		return t.write(out)
	}); err != nil {
		return err
	}
	return closeWrite(&t.b)
}

// fromHop opens what the hop says. All records that one read brought are sent
// with one write.
func (t *tlsRun) fromHop() error {
	in := newIntake(&t.b, plainFill{})
	defer in.release()
	out := opener{t: t}
	for { // the first time for what came behind the handshake
		done, err := out.drain(in.level)
		if err == nil {
			err = t.flush()
		}
		if err != nil {
			return err
		}
		if done {
			t.over(&t.b)
			return closeWrite(&t.a)
		}
		if in.buf != nil {
			in.adapt()
		}
		in.release()
		b, err := in.read()
		if err != nil {
			return err
		}
		if len(b) == 0 {
			return &sideError{B, errTruncated}
		}
		t.rec.Feed(b)
	}
}

// opener takes plaintext out of a record layer.
type opener struct {
	t   *tlsRun
	vec [64][]byte // of records opened in place
	buf net.Buffers
}

// drain opens and sends everything that was fed; done: close_notify came. When it
// returns, the record layer holds nothing of the caller's.
func (o *opener) drain(level int) (done bool, err error) {
	if o.t.inPlace != nil {
		return o.drainInPlace()
	}
	buf := take(level)
	defer buf.put()
	for n := 0; ; {
		m, err := o.t.rec.Read(buf.b[n:])
		n += m
		if n == len(buf.b) || err != nil {
			if werr := send(&o.t.a, buf.b[:n], &o.t.res.BtoA); werr != nil {
				return false, werr
			}
			n = 0
		}
		if err != nil {
			return o.t.ended(err)
		}
	}
}

func (o *opener) drainInPlace() (done bool, err error) {
	for n := 0; ; {
		b, err := o.t.inPlace.Next()
		if err == nil {
			o.vec[n] = b
			n++
		}
		if n == len(o.vec) || err != nil && n > 0 {
			o.buf = o.vec[:n]
			m, werr := o.buf.WriteTo(o.t.a.TCPConn) // one writev while the socket takes it
			o.t.res.BtoA += m
			clear(o.vec[:n])
			n = 0
			if werr != nil {
				return false, &sideError{A, fmt.Errorf("relay: write: %w", werr)}
			}
		}
		if err != nil {
			o.t.inPlace.Feed(nil) // lets go of what Next returned
			return o.t.ended(err)
		}
	}
}

// ended sorts what a record layer answers when it gives no more.
func (t *tlsRun) ended(err error) (done bool, _ error) {
	switch err {
	case record.ErrMore:
		return false, nil
	case io.EOF:
		return true, nil
	}
	return false, t.broken(err)
}

// alertTime is how long a broken hop may take to accept the alert that says so.
const alertTime = 100 * time.Millisecond

// broken makes err the end of the relay and tells the peer, if that needs no waiting.
func (t *tlsRun) broken(err error) error {
	if t.rec.Pending() && t.b.SetWriteDeadline(time.Now().Add(alertTime)) == nil {
		t.b.Write(t.rec.Take(nil)) // the relay is over whether it gets through or not
	}
	return &sideError{B, fmt.Errorf("%w: %w", errBroken, err)}
}

// plaintextFill reads no more than the buffer's records can carry.
type plaintextFill struct{}

func (plaintextFill) room(b []byte) int { return len(b) / slotLen * record.MaxPlain }
func (f plaintextFill) fill(fd int, b []byte) (int, error) {
	return unix.Read(fd, b[:f.room(b)])
}

// stride is the distance of two records sealed in place, one behind the other.
const stride = record.Head + record.MaxPlain + record.Tail

// recordFill scatters one read over the places where plaintexts are sealed.
type recordFill struct{ vec [16]unix.Iovec }

func (*recordFill) room(b []byte) int { return len(b) / slotLen * record.MaxPlain }

func (f *recordFill) fill(fd int, b []byte) (int, error) {
	slots := len(b) / slotLen
	for i := range slots {
		f.vec[i].Base = &b[i*stride+record.Head]
		f.vec[i].SetLen(record.MaxPlain)
	}
	n, _, e := syscall.Syscall(unix.SYS_READV, uintptr(fd), uintptr(unsafe.Pointer(&f.vec[0])), uintptr(slots))
	clear(f.vec[:slots]) // the buffer is not kept alive from here
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}
