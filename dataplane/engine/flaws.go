package engine

import (
	"aether/dataplane/httpmsg"
	"errors"
)

// RefusedCause names, by the status that the engine answered, why what a client sent was
// no request: a closed set, for journal.Entry.Cause.
func RefusedCause(status int) string {
	switch status {
	case 408:
		return "head-timeout"
	case 414, 431:
		return "head-too-large"
	}
	return "bad-request"
}

// FaultOf is what is wrong with a message that could not be read, where err tells it: the field, the byte or the
// limit, printable and bounded. "": err is about something else.
func FaultOf(err error) string {
	if f, ok := errors.AsType[interface {
		error
		Fault() string
	}](err); ok {
		return f.Fault()
	}
	return ""
}

// What is wrong with messages that no codec refuses.
const (
	strangeSwitch = httpmsg.Flaw("status 101 with an Upgrade field that is not what the request asked for (RFC 9110 7.8)")
	badAccept     = httpmsg.Flaw("Sec-WebSocket-Accept does not belong to the request's key (RFC 6455 4.1)")
	strangeTunnel = httpmsg.Flaw("extended CONNECT for a protocol that is HTTP or TLS itself: send an ordinary request")
	shortLength   = httpmsg.Flaw("the connection ended before the body had the length of its Content-Length (RFC 9112 8)")
	shortChunks   = httpmsg.Flaw("the connection ended before the last chunk of the body (RFC 9112 8)")
	shortHead     = httpmsg.Flaw("the connection ended in the middle of the head (RFC 9112 8)")
)
