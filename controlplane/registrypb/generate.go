// Package registrypb is what registry and registrar put on the wire (contract 9.2,
// 9.7): Go made from the .proto files beside it. It has no rule of its own;
// controlplane/registry says which rows are valid and what they mean.
package registrypb

//go:generate ./generate.sh
