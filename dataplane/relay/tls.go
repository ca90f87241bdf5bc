package relay

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"aether/mtls/record"
)

// TLS relays between a plain connection (side A), of an application perhaps by its Unix socket, and a mesh hop (side B), whose
// record layer is rec. first, which may be nil, was read from plain already and
// goes to the hop before anything else. It returns as Plain does. Counts are of
// plaintext.
func TLS(ctx context.Context, plain Conn, hop *net.TCPConn, rec record.Conn, first []byte, o Options) Result {
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
	var how filler = plaintextFill{}
	if t.inPlace != nil {
		how = recordFill{}
	}
	in := newIntake(&t.a, how, t.mem)
	defer in.release()
	t.hold(len(first))
	err := t.sendSealed(first, in)
	t.hold(-len(first))
	if err != nil {
		return err
	}
	in.release()
	for {
		b, err := in.read()
		if err == nil {
			switch {
			case len(b) == 0:
				in.release()
				if err := t.a.ended(); err != nil {
					return err
				}
				return t.closeHop()
			case t.inPlace != nil:
				err = t.sendInPlace(in)
			default:
				err = t.sendSealed(b, in)
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
func (t *tlsRun) sendSealed(b []byte, in *intake) error {
	if len(b) == 0 {
		return nil
	}
	buf := take(in.level, &in.permit, t.mem)
	defer buf.put()
	room := buf.size.slots * record.MaxPlain
	for len(b) > 0 {
		n := min(len(b), room)
		if err := t.locked(&in.permit, func() error {
			out, err := t.rec.Seal(buf.b[:0], b[:n])
			if err != nil {
				return t.broken(&in.permit, err)
			}
			return t.sendFrom(buf, out)
		}); err != nil {
			return err
		}
		t.res.AtoB += int64(n)
		b = b[n:]
	}
	return nil
}

// sendInPlace seals what recordFill laid into the buffer.
func (t *tlsRun) sendInPlace(in *intake) error {
	buf, n := in.buf, in.n
	if err := t.locked(&in.permit, func() error {
		if t.inPlace.Pending() {
			in.permit.release()
			if err := t.write(t.inPlace.Take(nil)); err != nil {
				return err
			}
		}
		end := 0
		for n > 0 {
			m := min(n, record.MaxPlain)
			rec, err := t.inPlace.SealRecord(buf.b[end:], m)
			if err != nil {
				return t.broken(&in.permit, err)
			}
			n -= m
			end += len(rec)
		}
		return t.sendFrom(buf, buf.b[:end])
	}); err != nil {
		return err
	}
	t.res.AtoB += int64(in.n)
	return nil
}

// locked runs f with the hop's writing half to itself, then sends what the
// other direction could not meanwhile.
func (t *tlsRun) locked(w *permit, f func() error) error {
	if !t.wmu.TryLock() {
		w.release() // whoever has it may be waiting for the peer
		t.wmu.Lock()
	}
	err := f()
	t.wmu.Unlock()
	if err != nil {
		return err
	}
	return t.flush(w)
}

// flush sends what the record layer itself wants sent. When the writing half is
// taken, whoever has it flushes afterwards: the reading half never waits for it.
func (t *tlsRun) flush(w *permit) error {
	for t.rec.Pending() {
		w.release()
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

// sendFrom writes sealed bytes to the hop, by way of the buffer that they lie in.
func (t *tlsRun) sendFrom(buf *buffer, sealed []byte) error {
	var n int64 // not payload
	buf.piece(0, sealed)
	return buf.send(&t.b, 1, &n)
}

// write writes what seldom is: whatever comes in no buffer of ours.
func (t *tlsRun) write(b []byte) error {
	if _, err := t.b.Write(b); err != nil {
		return &sideError{B, fmt.Errorf("relay: write to the hop: %w", err)}
	}
	return nil
}

// closeHop ends the direction to the hop: close_notify, then FIN.
func (t *tlsRun) closeHop() error {
	t.over(&t.a)
	if err := t.locked(nil, func() error {
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
	in := newIntake(&t.b, plainFill{}, t.mem)
	defer in.release()
	kept := 0 // by the record layer, as the account has it
	defer func() { t.hold(-kept) }()
	for { // the first time for what came behind the handshake
		if in.buf == nil {
			in.buf = take(0, &in.permit, t.mem)
		}
		done, err := t.drain(in)
		if err == nil {
			err = t.flush(&in.permit)
		}
		if err != nil {
			return err
		}
		if done {
			t.over(&t.b)
			return closeWrite(&t.a)
		}
		if n := t.rec.Held(); n != kept {
			t.hold(n - kept)
			kept = n
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
			if err := t.b.ended(); err != nil {
				return err
			}
			return &sideError{B, errTruncated}
		}
		t.rec.Feed(b)
	}
}

// drain opens and sends everything that was fed; done: close_notify came. When it
// returns, the record layer holds nothing of the caller's.
func (t *tlsRun) drain(in *intake) (done bool, err error) {
	if t.inPlace != nil {
		return t.drainInPlace(in.buf)
	}
	buf := take(in.level, &in.permit, t.mem)
	defer buf.put()
	for n := 0; ; {
		m, err := t.rec.Read(buf.b[n:])
		n += m
		if n == len(buf.b) || err != nil && n > 0 {
			buf.piece(0, buf.b[:n])
			if werr := buf.send(&t.a, 1, &t.res.BtoA); werr != nil {
				return false, werr
			}
			n = 0
		}
		if err != nil {
			return t.ended(buf.permit, err)
		}
	}
}

// drainInPlace opens records where they lie, in buf or in the record layer's own memory, and
// sends them from there.
func (t *tlsRun) drainInPlace(buf *buffer) (done bool, err error) {
	for n := 0; ; {
		b, err := t.inPlace.Next()
		if err == nil {
			buf.piece(n, b)
			n++
		}
		if n == len(buf.vec) || err != nil && n > 0 {
			if werr := buf.send(&t.a, n, &t.res.BtoA); werr != nil {
				return false, werr
			}
			n = 0
		}
		if err != nil {
			t.inPlace.Feed(nil) // lets go of what Next returned
			return t.ended(buf.permit, err)
		}
	}
}

// ended sorts what a record layer answers when it gives no more.
func (t *tlsRun) ended(w *permit, err error) (done bool, _ error) {
	switch err {
	case record.ErrMore:
		return false, nil
	case io.EOF:
		return true, nil
	}
	return false, t.broken(w, err)
}

// alertTime is how long a broken hop may take to accept the alert that says so.
const alertTime = 100 * time.Millisecond

// broken makes err the end of the relay and tells the peer, if that needs no waiting.
func (t *tlsRun) broken(w *permit, err error) error {
	w.release()
	if t.rec.Pending() && t.b.SetWriteDeadline(time.Now().Add(alertTime)) == nil {
		t.b.Write(t.rec.Take(nil)) // the relay is over whether it gets through or not
	}
	return &sideError{B, fmt.Errorf("%w: %w", errBroken, err)}
}

// plaintextFill reads no more than the buffer's records can carry.
type plaintextFill struct{}

func (plaintextFill) room(b []byte) int { return len(b) / slotLen * record.MaxPlain }
func (f plaintextFill) fill(fd uintptr, b *buffer) (int, error) {
	return read(fd, b.b[:f.room(b.b)])
}

// stride is the distance of two records sealed in place, one behind the other.
const stride = record.Head + record.MaxPlain + record.Tail

// recordFill scatters one read over the places where plaintexts are sealed.
type recordFill struct{}

func (recordFill) room(b []byte) int { return len(b) / slotLen * record.MaxPlain }

func (recordFill) fill(fd uintptr, b *buffer) (int, error) {
	slots := len(b.b) / slotLen
	for i := range slots {
		b.piece(i, b.b[i*stride+record.Head:][:record.MaxPlain])
	}
	n, err := readv(fd, b.vec[:slots])
	clear(b.vec[:slots]) // the buffer is not kept alive from here
	return n, err
}
