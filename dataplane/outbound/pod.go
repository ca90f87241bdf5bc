package outbound

import (
	"context"
	"sync/atomic"

	"aether/dataplane/engine"
	"aether/mtls/spiffeid"
)

// Pod is a workload whose egress is served. It is neither copied nor changed from outside once it is used.
type Pod struct {
	Context   context.Context // ends with the pod, and its relays with it
	Engine    *engine.Pod
	Container string
	Namespace string
	Name      string
	Account   string
	ID        spiffeid.ID
	Sockets   engine.Sockets

	waiting atomic.Int64 // requests and connections of it that wait for rows
}
