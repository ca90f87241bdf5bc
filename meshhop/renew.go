package meshhop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"aether/mtls"
	"aether/mtls/record"
)

// errUnconfirmed: the destination of a renewal sent what it has no reason to send.
var errUnconfirmed = errors.New("the peer sent data in the place of close_notify")

// Renew shakes hands with the endpoint of k for the certificates only, and closes the connection: k's SNI and Proto do not
// matter. It takes a turn as Dial does. The Bond is of certificates that were verified; told: so was
// ours by the other end, which counts it from now on.
//
// The ClientHello has no server name and offers mtls.RenewALPN, and "h2" behind it. A destination of this package
// answers with close_notify and opens nothing. An Envoy-based one selects no protocol (contract 6.1) and does not
// end sessions with their certificates, so told is true then; such a ClientHello is its declared port's, over HTTP if that
// is an HTTP port: nothing reaches the application. Where it is a raw-TCP port, the application sees a connection that
// ends without a byte (contract 6.2). A destination that does not know of it refuses, or selects "h2": told is false.
func (d *Dialer) Renew(ctx context.Context, k Key) (b *mtls.Bond, told bool, err error) {
	k.Proto, k.SNI = Renew, ""
	s, err := d.Dial(ctx, k)
	if err != nil {
		return nil, false, err
	}
	defer s.Conn.Close()
	switch s.ALPN {
	case "":
		_, _ = s.Conn.Write(s.Record().CloseNotify(nil)) // nobody waits for it
		return s.Bond, true, nil
	case mtls.RenewALPN:
	default:
		return s.Bond, false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(d.Handshake, DefaultHandshake))
	defer cancel()
	if err := confirmed(ctx, s.Conn, s.Record()); err != nil {
		return nil, false, fmt.Errorf("meshhop: renew %s: %w", k, err)
	}
	return s.Bond, true, nil
}

// confirmed reads close_notify, until ctx ends.
func confirmed(ctx context.Context, c net.Conn, rec record.Conn) error {
	stop := context.AfterFunc(ctx, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var buf [512]byte // an alert is smaller
	var plain [1]byte
	for {
		switch n, err := rec.Read(plain[:]); {
		case n > 0:
			return errUnconfirmed
		case err == io.EOF:
			return nil
		case !errors.Is(err, record.ErrMore):
			return err
		}
		n, err := c.Read(buf[:])
		if n == 0 {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return cmp.Or(ctx.Err(), err)
		}
		rec.Feed(buf[:n])
	}
}
