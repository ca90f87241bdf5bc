package outbound

import (
	"cmp"
	"errors"

	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/meshhop"
)

// because is what was wrong with an answer that could not be read, to be appended to a text; "": it was not that.
func because(cause error) string {
	if f := engine.FaultOf(cause); f != "" {
		return ": " + f
	}
	return ""
}

// why classes what kept a hop from being made, or ended it while requests waited: a closed
// set, fit for a metric's label.
func why(err error) string {
	if errors.Is(err, engine.ErrHopFull) {
		return "hop-full"
	}
	return cmp.Or(ending(err), string(meshhop.ReasonOf(err)))
}

// cut classes what ended a hop under a request that had been sent: the same set.
func cut(err error) string { return cmp.Or(ending(err), exchange.Closed.String()) }

// ending is why we ended a session; "": it was not us.
func ending(err error) string {
	switch {
	case errors.Is(err, engine.ErrSilent):
		return "silent"
	case errors.Is(err, errEndpointGone):
		return "endpoint-gone"
	case errors.Is(err, errEndpointUnhealthy):
		return "endpoint-unhealthy"
	case errors.Is(err, errRevoked):
		return "identity-revoked"
	case errors.Is(err, engine.ErrExpired), errors.Is(err, meshhop.ErrExpired):
		return "identity-expired"
	}
	return ""
}

const causeNoTunnel = "upgrade-not-supported"

const causeOverflow = "overflow"

var (
	errEndpointGone      = errors.New("the endpoint left the registry")
	errEndpointUnhealthy = errors.New("the endpoint is unhealthy")
)

var errNoIdentity = errors.New("the endpoint's row has no valid SPIFFE ID")

// errRevoked: a session was opened with certificates that are trusted no more.
var errRevoked = errors.New("an identity of the session is trusted no more")

// errNotAdmitted: the destination's side of the process took the caller for nobody it serves.
var errNotAdmitted = errors.New("the destination does not serve this port")

// What is short when a request, or a connection, is not served for want of it: also
// the cause in the journal.
const (
	causeOverload = "overload"
	textOverload  = "overload: the proxy of this node is short of memory, or this pod holds too much of it; try again"
)

// Names of Entry.Cause for limits of time that a rule sets.
const (
	causeRequestTimeout = "route-timeout" // timeouts.request
	causeTryTimeout     = "try-timeout"   // timeouts.backendRequest
	causeDeadline       = "grpc-deadline" // grpc-timeout, which the client set
)
